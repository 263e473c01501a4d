"""The progress display of a sweep: which runs are in progress, their steps, and how many are done."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from launch.runs.store import RunFolder
from launch.tracking.follower import LogTail
from suite.training.metrics import LOSS, STEP, is_step

INTERVAL_S = 30.0
"""Seconds between two lines without a terminal."""


class SweepProgress:
    """A bar for the sweep and one for each run in training; without a terminal, a line every INTERVAL_S."""

    def __init__(self, console: Console, tasks: int) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._bars.add_task("sweep", total=tasks, status="")
        self._done, self._tasks = 0, tasks
        self._runs: dict[str, tuple[TaskID, LogTail | None, int]] = {}
        self._status: dict[str, str] = {}
        self._last = time.monotonic()

    def __enter__(self) -> SweepProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    @property
    def log(self) -> Callable[[str], None]:
        """Prints a line above the bars."""
        return self._bars.console.print

    def begin(self, name: str, run: RunFolder | None = None, steps: int = 1) -> None:
        """Shows a task; with a run's folder, also its steps."""
        bar = self._bars.add_task(name, total=steps, status="")
        self._runs[name] = bar, None if run is None else LogTail(run.metrics), steps

    def remove(self, name: str) -> None:
        if name in self._runs:
            bar, _, _ = self._runs.pop(name)
            self._bars.remove_task(bar)
        self._status.pop(name, None)

    def end(self, name: str) -> None:
        """Removes a task that is done or will not be retried."""
        self.remove(name)
        self._done += 1
        self._bars.update(self._all, completed=self._done)

    def poll(self, waiting_for: str = "") -> None:
        """Shows what the runs wrote since the last call; ``waiting_for`` says why tasks wait."""
        self._bars.update(self._all, status=waiting_for)
        for name, (bar, tail, steps) in self._runs.items():
            new = list(filter(is_step, tail.values())) if tail is not None else []
            if not new:
                continue
            last = new[-1]
            loss = "not finite" if last[LOSS] is None else f"{last[LOSS]:.3f}"
            self._status[name] = f"{name} step {last[STEP]}/{steps} loss {loss}"
            self._bars.update(bar, completed=last[STEP], status=f"loss {loss}")
        if not self._console.is_terminal and time.monotonic() > self._last + INTERVAL_S:
            self._last = time.monotonic()
            now = "; ".join(self._status.get(name, name) for name in self._runs)
            status = "; ".join(part for part in (now, waiting_for) if part)
            self._console.print(f"{self._done} of {self._tasks} done; {status}")
