"""The progress display of a sweep: which runs are in progress, their steps, and how many are done."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn

from launch.runs.store import RunFolder
from launch.tracking.follower import LogTail
from suite.training.metrics import LOSS, STEP, is_step

INTERVAL_S = 30.0
"""Seconds between two lines without a terminal."""


class SweepProgress(Progress):
    """A bar for the sweep and one for each run in training; without a terminal, a line every INTERVAL_S."""

    def __init__(self, console: Console, tasks: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._sweep = self.add_task("sweep", total=tasks, status="")
        self._runs: dict[str, tuple[TaskID, LogTail | None]] = {}
        self._last_line = time.monotonic()

    def begin(self, name: str, run: RunFolder | None, steps: int) -> None:
        """Shows a task; with a run's folder, also its steps."""
        bar = self.add_task(name, total=steps, status="")
        self._runs[name] = bar, None if run is None else LogTail(run.metrics)

    def remove(self, name: str) -> None:
        if name in self._runs:
            bar, _ = self._runs.pop(name)
            self.remove_task(bar)

    def end(self, name: str) -> None:
        """Removes a task that is done or will not be retried."""
        self.remove(name)
        self.advance(self._sweep)

    def poll(self, waiting_for: str) -> None:
        """Shows what the runs wrote since the last call; ``waiting_for`` says why tasks wait."""
        self.update(self._sweep, status=waiting_for)
        for bar, tail in self._runs.values():
            new = list(filter(is_step, tail.values())) if tail is not None else []
            if new:
                loss = "not finite" if new[-1][LOSS] is None else f"{new[-1][LOSS]:.3f}"
                self.update(bar, completed=new[-1][STEP], status=f"loss {loss}")
        if not self.console.is_terminal and time.monotonic() > self._last_line + INTERVAL_S:
            self._last_line = time.monotonic()
            sweep, *runs = self.tasks
            status = "; ".join([*map(_line, runs), *([waiting_for] if waiting_for else [])])
            self.console.print(f"{sweep.completed} of {sweep.total} done; {status}")


def _line(run: Task) -> str:
    status = run.fields["status"]
    return f"{run.description} step {run.completed}/{run.total} {status}" if status else run.description
