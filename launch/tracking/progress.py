"""A run's progress: a bar in a terminal, otherwise occasional lines. A job on a cluster prints marked lines to its log,
from which ``make submit`` draws the same bar.

worker's files --> Follower --> Bar                                     (run on this machine)
worker's files --> Follower --> marked lines of the job's log --> Bar   (job on a cluster)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launch.error_log import log_error
from launch.tracking.step_line import Figure, fitted, headed
from suite.log import Log
from suite.training.periodic import PeriodicThread

MARK = "@gpipe-progress "
"""Prefix of a progress line in a job's log."""

FOLLOWED = "GPIPE_FOLLOWED"
"""Environment variable: 1 if the output is a job's log that is followed from another machine."""

EVERY_S, EVERY_S_AT_MOST = 2.0, 60.0
"""Minimum seconds between two marked lines: a thousandth of the time so far, within these bounds. The log is stored,
and reread from its start."""

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

    thread = PeriodicThread(poll, SILENT_S, "progress", log_error)
    thread.start()
    try:
        yield set_part
    finally:
        thread.end()


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


@dataclass(frozen=True)
class Update:
    step: int
    steps: int
    figures: tuple[Figure, ...]
    """Loss, speed and time left, as ranked texts."""
    elapsed_s: float
    log_every: int = 1
    """Steps between two lines where there is no terminal."""

    def line(self) -> str:
        """Returns it as a marked line for a log."""
        return MARK + json.dumps(asdict(self))


def read_update(line: str) -> Update | None:
    """Parses a line of ``Update.line``; returns None for any other line."""
    if not line.startswith(MARK):
        return None
    try:
        fields = json.loads(line.removeprefix(MARK))
        return Update(**fields | {"figures": tuple((int(rank), str(text)) for rank, text in fields["figures"])})
    except (ValueError, TypeError, KeyError):  # an incomplete line, or one of another version
        return None


class Bar:
    """A bar in a terminal, otherwise a line every few steps; or marked lines, from which a bar can be drawn on another
    machine. What else is printed to its console appears above the bar."""

    def __init__(self, console: Console, marked: bool = False) -> None:
        self._console, self._marked, self._next_s = console, marked, 0.0
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(_BAR_WIDTH), TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(), console=console, transient=False, disable=marked or not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, numbers="starting workers", visible=False)
        self._printed: int | None = None

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        """Stops the display; its last state stays visible."""
        self._bar.stop()

    def show(self, update: Update) -> None:
        """Shows the run's progress. Without a terminal, it prints a line every ``log_every`` steps; of marked lines one
        if the last one is long enough ago; and one for the last step."""
        if self._marked:
            self._show_marked(update)
            return
        task = self._bar.tasks[0]
        task.start_time = self._bar.get_time() - update.elapsed_s  # the run may have started before the bar
        room = self._console.width - _BAR_WIDTH - _BESIDE - 2 * len(str(update.steps))
        numbers = fitted(update.figures, room)
        self._bar.update(self._task, completed=update.step, total=update.steps, numbers=numbers, visible=True)
        due = update.step // update.log_every
        if self._printed is None:  # the run may be resumed, and its steps before this one are not printed now
            self._printed = max(0, update.step - 1) // update.log_every
        if not self._console.is_terminal and (due > self._printed or update.step == update.steps):
            self._printed = due
            self._console.print(headed(update.step, update.steps, update.figures), soft_wrap=True)

    def _show_marked(self, update: Update) -> None:
        if time.monotonic() >= self._next_s or update.step == update.steps:
            self._next_s = time.monotonic() + min(max(EVERY_S, update.elapsed_s / 1000), EVERY_S_AT_MOST)
            self._console.print(update.line())
