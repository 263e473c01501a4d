"""Runs the tasks of a sweep, as many at once as fit, and prints what happens."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from launch.sweeps.devices import Devices, Work, end_all
from launch.sweeps.tasks import Task
from launch.tracking.follower import LogTail
from suite.training.metrics import LOSS, STEP, is_step

POLL_S = 0.5
"""Seconds between two looks at the running tasks."""

INTERVAL_S = 30.0
"""Seconds between two lines about the running tasks."""

MAX_TRIES = 2
"""A task that fails twice needs a person. Within a run ``train.max_restarts`` bounds the attempts."""


class Runner:
    """Starts each task, in their order, as soon as its devices are free and the task before it is done. Smaller ones
    pass one that waits. A failure affects only the tasks that come after it."""

    def __init__(self, tasks: Sequence[Task], devices: Devices, console: Console) -> None:
        self._tasks, self._devices, self._console = tasks, devices, console
        self._names = {task.name for task in tasks}
        self._running: dict[Task, Work] = {}
        self._tails: dict[str, LogTail] = {}
        self._status: dict[str, str] = {}
        self._tries: Counter[str] = Counter()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._next_line_s = time.monotonic() + INTERVAL_S
        self.failures: list[str] = []
        """One sentence for each task that failed."""

    def run(self) -> None:
        """Returns when all tasks are done or have failed. An interrupt ends those that run."""
        try:
            while self._advance():
                time.sleep(POLL_S)
        finally:
            end_all(self._running.values())

    def _advance(self) -> list[Task]:
        """Collects the tasks that ended, starts those that can, and returns all that are left."""
        for task, work in list(self._running.items()):
            if (code := work.poll()) is not None:
                del self._running[task]
                work.kill()  # its workers may have survived it
                self._end(task, "" if code == 0 else _reason(task, code))
        waiting = [task for task in self._left() if task not in self._running]
        free = self._devices.free(self._running) if waiting else 0
        for task in waiting:
            if task.after in self._failed:
                self._fail(task, f"not started, because {task.after} failed")
            elif task.devices <= free and (task.after in self._done or task.after not in self._names):
                free -= task.devices
                self._start(task)
        self._print_status(free)
        return self._left()

    def _left(self) -> list[Task]:
        return [task for task in self._tasks if task.name not in self._done | self._failed]

    def _start(self, task: Task) -> None:
        self._tries[task.name] += 1
        self._console.print(f"{task.name}: started")
        self._tails[task.name] = LogTail(task.run.metrics, from_end=True)
        self._status[task.name] = task.name
        try:
            task.prepare()
            self._running[task] = self._devices.start(task, self._running)
        except OSError as error:
            self._end(task, f"{error.filename}: {error.strerror}")

    def _end(self, task: Task, fault: str) -> None:
        if not fault:
            self._done.add(task.name)
            self._console.print(f"{task.name}: done")
        elif self._tries[task.name] < MAX_TRIES:
            self._console.print(f"{task.name}: failed: {fault}; it is tried once more")
        else:
            self._fail(task, fault)

    def _fail(self, task: Task, fault: str) -> None:
        self._failed.add(task.name)
        self._console.print(f"{task.name}: failed: {fault}")
        self.failures.append(f"{task.name} failed: {fault}")

    def _print_status(self, free: int) -> None:
        """Prints a line every INTERVAL_S: what is done, the steps of the running tasks, or why all wait."""
        for task in self._running:
            if new := [line for line in self._tails[task.name].values() if is_step(line)]:
                loss = "not finite" if new[-1][LOSS] is None else f"{new[-1][LOSS]:.3f}"
                step = f"step {new[-1][STEP]}/{task.member.experiment.train.steps}"
                self._status[task.name] = f"{task.name} {step} loss {loss}"
        if time.monotonic() < self._next_line_s:
            return
        self._next_line_s = time.monotonic() + INTERVAL_S
        status = [self._status[task.name] for task in self._running]
        if not status and (left := self._left()):
            status = [f"{free} of {self._devices.total} devices are free; {left[0].name} needs {left[0].devices}"]
        self._console.print(f"{len(self._done)} of {len(self._tasks)} done; {'; '.join(status)}")


def _reason(task: Task, code: int) -> str:
    """Returns why a command failed: its last error, if it could print one."""
    errors = [line for line in task.log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    if code not in (1, 2) or not errors:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}; its log is {task.log}"
    return errors[-1].removeprefix("error: ")
