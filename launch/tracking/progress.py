"""A run's progress: a bar in a terminal, otherwise occasional lines; and lines about other long work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launch.error_log import log_error
from launch.tracking.step_line import Figure, fitted, headed
from suite.log import Log
from suite.training.periodic import PeriodicThread

LINE_S = 60.0
"""Most seconds between two lines of a run without a terminal, if its steps are shorter."""

_BAR_WIDTH, _BESIDE = 20, 18
"""Columns of the bar; of the word step, the elapsed time and the gaps beside it."""

SILENT_S = 2.0
"""Work that takes no longer than this logs no progress."""


@contextmanager
def log_when_long(what: str, log: Log) -> Iterator[Callable[[str], None]]:
    """A context for work that is usually short. It logs the elapsed time after ``SILENT_S`` seconds, after twice as
    many, and so on, and when the work reaches another part. Yields a function that sets the name of the current part.
    """
    start, part, logged_part, due_s = time.monotonic(), "", "", SILENT_S

    def set_part(name: str) -> None:
        nonlocal part
        part = name

    def poll() -> None:
        nonlocal logged_part, due_s
        elapsed_s = time.monotonic() - start
        if elapsed_s < due_s and part == logged_part:
            return
        logged_part, due_s = part, max(due_s, 2 * elapsed_s)
        log(f"{what}, {elapsed_s:.0f} s so far" + (f": {part}" if part else ""))

    with PeriodicThread(poll, SILENT_S, "progress", log_error):
        yield set_part


def log_by_part(what: str, log: Log) -> Callable[[int, int, str], None]:
    """Returns a function to call before each part of long work. It logs the part, the number of parts, and the
    estimated time left, from the mean of the finished parts."""
    start = time.monotonic()

    def report(done: int, total: int, part: str) -> None:
        nonlocal start
        if not done:
            start = time.monotonic()
        elapsed_s = time.monotonic() - start
        left = f", {elapsed_s:.0f} s so far, about {elapsed_s / done * (total - done):.0f} s left" if done else ""
        log(f"{what}: {done + 1} of {total}{left}: {part}")

    return report


class Bar:
    """A bar in a terminal, otherwise a line now and then. What else is printed to its console appears above the bar."""

    def __init__(self, console: Console, steps: int, log_every: int) -> None:
        """For a run of ``steps`` steps. Without a terminal, it prints at each multiple of ``log_every`` steps."""
        self._console, self._steps, self._log_every = console, steps, log_every
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(_BAR_WIDTH), TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(), console=console, transient=False, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=steps, numbers="starting workers")
        self._printed: int | None = None
        self._next_s = time.monotonic() + LINE_S

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        """Stops the display; its last state stays visible."""
        self._bar.stop()

    def show(self, step: int, figures: Sequence[Figure]) -> None:
        """Shows a step with its loss, speed and time left. Without a terminal, it prints a line at multiples of
        ``log_every``, when the last line is a minute old, and for the last step."""
        room = self._console.width - _BAR_WIDTH - _BESIDE - 2 * len(str(self._steps))
        self._bar.update(self._task, completed=step, numbers=fitted(figures, room))
        multiple = step // self._log_every
        if self._printed is None:  # the run may be resumed, and its steps before this one are not printed now
            self._printed = max(0, step - 1) // self._log_every
        is_due = multiple > self._printed or step == self._steps or time.monotonic() >= self._next_s
        if is_due and not self._console.is_terminal:
            self._printed, self._next_s = multiple, time.monotonic() + LINE_S
            self._console.print(headed(step, self._steps, figures), soft_wrap=True)
