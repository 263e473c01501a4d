"""A run's progress: a bar at a terminal, a line now and then without one, and marked lines where another process shows
it: a job on a cluster prints them, and whoever follows the job draws the same bar from them.

worker's files --> Follower --> Bar                           (here)
worker's files --> Follower --> marked lines of the job's log --> Bar   (there, then here)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launch.error_log import log_error
from suite.training.recurring import Recurring

MARK = "@gpipe-progress "
"""What a line of a log begins with that is meant for a bar."""

FOLLOWED = "GPIPE_FOLLOWED"
"""Environment variable: 1 where the output is followed from elsewhere, by a job's log."""

EVERY_S = 2.0
"""Between two marked lines: a log is kept, and read again from its beginning."""

SILENT_S = 2.0
"""Work that takes no longer says nothing of its progress."""


@contextmanager
def told_when_long(what: str, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """A context for work that usually takes no time: it says how long it has taken after ``SILENT_S`` seconds, after
    twice, four times as many and so on, and when it comes to another part. Yields what is called with the name of each
    part."""
    begun, part, told, due = time.monotonic(), "", "", SILENT_S

    def enter(name: str) -> None:
        nonlocal part
        part = name

    def look() -> None:
        nonlocal told, due
        elapsed = time.monotonic() - begun
        if elapsed < due and part == told:
            return
        told, due = part, max(due, 2 * elapsed)
        say(f"{what}, {elapsed:.0f} s so far" + (f": {part}" if part else ""))

    watching = Recurring(look, SILENT_S, "progress", log_error)
    watching.start()
    try:
        yield enter
    finally:
        watching.end()


def told_by_part(what: str, say: Callable[[str], None]) -> Callable[[int, int, str], None]:
    """Returns a function to call before each part of a long work. It says which part begins, how many there are, and
    about how long the rest takes: it estimates the rest from the mean of the finished parts."""
    begun = time.monotonic()

    def report(done: int, total: int, part: str) -> None:
        nonlocal begun
        if not done:
            begun = time.monotonic()
        elapsed = time.monotonic() - begun
        left = f", {elapsed:.0f} s so far, about {elapsed / done * (total - done):.0f} s left" if done else ""
        say(f"{what}: {done + 1} of {total}{left}: {part}")

    return report


@dataclass(frozen=True)
class Update:
    """How far a run is."""

    step: int
    steps: int
    numbers: str
    """Loss, speed and time left, as a person reads them."""
    elapsed_s: float

    def line(self) -> str:
        """Returns it as a line of a log."""
        return MARK + json.dumps(asdict(self))


def read_update(line: str) -> Update | None:
    """Returns what ``Update.line`` wrote, or None for any other line."""
    if not line.startswith(MARK):
        return None
    try:
        return Update(**json.loads(line.removeprefix(MARK)))
    except (ValueError, TypeError):  # half a line, or another version's
        return None


class Face(Protocol):
    """What shows progress."""

    def start(self) -> None:
        """Begins to show."""

    def stop(self) -> None:
        """Leaves the last state behind."""

    def say(self, text: str) -> None:
        """Prints a line, above what is being shown."""

    def show(self, update: Update) -> None:
        """Shows how far the run is."""


def face_of(console: Console) -> Face:
    """Returns the face that suits this process."""
    return Marked(console) if os.environ.get(FOLLOWED) == "1" else Bar(console)


class Bar:
    """A bar at a terminal, otherwise at most ten lines a run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(), console=console, transient=False, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, numbers="starting workers", visible=False)
        self._printed = 0

    def start(self) -> None:
        """Begins to show."""
        self._bar.start()

    def stop(self) -> None:
        """Leaves the last state behind."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.console.print(text)

    def show(self, update: Update) -> None:
        """Moves the bar. Where there is none: a line for every tenth of the run."""
        task = self._bar.tasks[0]
        task.start_time = self._bar.get_time() - update.elapsed_s  # also where a run is followed from its middle on
        self._bar.update(
            self._task, completed=update.step, total=update.steps, numbers=update.numbers, visible=True
        )  # fmt: skip
        due = update.step // max(1, update.steps // 10)
        if not self._console.is_terminal and (due > self._printed or update.step == update.steps):
            self._printed = due
            self._console.print(f"step {update.step}/{update.steps}  {update.numbers}")


class Marked:
    """Lines for a bar elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def start(self) -> None:
        """Nothing to begin."""

    def stop(self) -> None:
        """Nothing to leave behind."""

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text)

    def show(self, update: Update) -> None:
        """Prints the update where the last one is long enough ago, and at the end always."""
        if time.monotonic() >= self._next or update.step == update.steps:
            self._next = time.monotonic() + EVERY_S
            self._console.print(update.line())
