"""The live face of a sweep: which runs are at it, how far, and how many are done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from launch.follow import Tail
from launch.runs import RunFolder

EVERY_S = 30.0
"""Between two lines where there is no terminal."""


class Board:
    """A bar for the whole and one for each run that is being trained; without a terminal, a line now and then."""

    def __init__(self, console: Console, tasks: int) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._all = self._bars.add_task("sweep", total=tasks, told="")
        self._done, self._tasks = 0, tasks
        self._runs: dict[str, tuple[TaskID, Tail | None, int]] = {}
        self._told: dict[str, str] = {}
        self._last = time.monotonic()

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    @property
    def say(self) -> Callable[[str], None]:
        """Prints a line above the bars."""
        return self._bars.console.print

    def begin(self, name: str, run: RunFolder | None = None, steps: int = 1) -> None:
        """Shows a task; with a run's folder, the steps that it writes down."""
        bar = self._bars.add_task(name, total=steps, told="")
        self._runs[name] = bar, None if run is None else Tail(run.metrics), steps

    def put_off(self, name: str) -> None:
        """Takes a task off that is not done."""
        if name in self._runs:
            bar, _, _ = self._runs.pop(name)
            self._bars.remove_task(bar)
        self._told.pop(name, None)

    def end(self, name: str) -> None:
        """Takes a task off that is done, or failed for good."""
        self.put_off(name)
        self._done += 1
        self._bars.update(self._all, completed=self._done)

    def look(self, waits: str = "") -> None:
        """Reads what the runs wrote since the last look; ``waits`` says what is waited for."""
        self._bars.update(self._all, told=waits)
        for name, (bar, tail, steps) in self._runs.items():
            lines = list(tail.lines()) if tail is not None else []
            if not lines:
                continue
            try:
                last = json.loads(lines[-1])
            except ValueError:  # rewritten this moment by a run that is taken up again
                continue
            loss = "not finite" if last["loss"] is None else f"{last['loss']:.3f}"
            self._told[name] = f"{name} step {last['step']}/{steps} loss {loss}"
            self._bars.update(bar, completed=last["step"], told=f"loss {loss}")
        if not self._console.is_terminal and time.monotonic() > self._last + EVERY_S:
            self._last = time.monotonic()
            now = "; ".join(self._told.get(name, name) for name in self._runs)
            told = "; ".join(part for part in (now, waits) if part)
            self._console.print(f"{self._done} of {self._tasks} done; {told}")
