"""Runs tasks concurrently on the devices that are free; a cluster may have other users.

The order is by priority, then by need (larger first), then by position in the list. Smaller tasks may pass a task that
does not fit four times; then freed devices are reserved for it, but only if it would fit without our own running tasks:
no device idles because of what others hold. Tasks that fail without a user's fault are retried
(``launch/sweeps/retries.py``); one whose devices others took first is started again. No task waits for others' devices
longer than MAX_WAIT_S.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.sweeps.retries import MAX_ATTEMPTS, PAUSE_S, RetryDecision, decide_retry, message_of
from suite.errors import PlacementError, WorkerError

POLL_S = 0.5
"""Seconds between two polls."""

MAX_WAIT_S = 86400.0
"""Seconds that a task waits for devices that others hold, while none of ours ends."""

COUNTED_S = 10.0
"""Seconds after which a pool counts the devices of a started task as taken."""

MAX_PASSED_OVER = 4
"""So many tasks may start before an earlier one that does not fit; then devices are reserved for it."""


@dataclass(frozen=True)
class Task:
    """Work done in its own thread, by processes on devices."""

    name: str
    need: int
    """Devices."""
    work: Callable[[tuple[int, ...]], None]
    """Gets the numbers of its devices, which matter only if the sweep assigns them."""
    after: tuple[str, ...] = ()
    """Names of tasks that must be done first; if one of them fails, this one is not started."""
    priority: int = 0


DevicePool = Callable[[], tuple[int, int]]
"""Returns the number of devices, and how many are free. A pool need not know, or not yet, what our tasks hold."""


def in_order(tasks: Sequence[Task]) -> list[Task]:
    """Returns tasks in their order of start."""
    return sorted(tasks, key=lambda task: (-task.priority, -task.need))


def select_task(due: Sequence[Task], free: int, reachable: int, passed: Mapping[str, int]) -> Task | None:
    """Returns the task to start now, of those due in order; None if all must wait.

    ``free`` devices are free now, ``reachable`` would be without our own tasks; ``passed`` counts how often each task
    was passed over.
    """
    for task in due:
        if task.need <= free:
            return task
        if task.need <= reachable and passed.get(task.name, 0) >= MAX_PASSED_OVER:
            return None
    return None


class SchedulerListener(Protocol):
    """Receives the events of a scheduler, with the number of attempts so far. Each method does nothing here."""

    def started(self, task: Task) -> None:
        """A task started, for the first time or again."""

    def postponed(self, task: Task, error: BaseException, verdict: RetryDecision, attempts: int) -> None:
        """A task failed and will be retried."""

    def ended(self, task: Task, error: BaseException | None, attempts: int) -> None:
        """A task is done, or failed and will not be retried."""

    def poll(self, waiting_for: str) -> None:
        """Called at every poll; ``waiting_for`` says what tasks wait for while none of ours runs."""


class Scheduler:
    """Runs all tasks; a failure only affects tasks that come after it.

    Threads are daemons: an interrupt ends the wait at once, and the caller must end the tasks' processes.
    """

    def __init__(self, tasks: Sequence[Task], device_pool: DevicePool, listener: SchedulerListener) -> None:
        self._device_pool, self._listener = device_pool, listener
        self._waiting = list(tasks)
        self._names = {task.name for task in tasks}
        self._running: dict[Task, tuple[int, ...]] = {}
        self._done: set[str] = set()
        self._failed_tasks: set[str] = set()
        self._attempts: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        self._to_retry: set[str] = set()
        self._waiting_since: dict[str, float] = {}
        """When others were first seen to hold a task's devices; empty again when a task ends that had its own."""
        self._counted_at, self._still_free = 0.0, 0
        """When the pool surely counts the task that was started last, and how many devices are free until then."""
        self._results: queue.Queue[tuple[Task, BaseException | None]] = queue.Queue()

    def run(self) -> None:
        while self._waiting or self._running:
            self._drop_blocked()
            total, free = self._device_pool()
            if time.monotonic() < self._counted_at:
                free = min(free, self._still_free)
            due = self._due()
            task = self._next(due, total, free)
            if task is not None:
                self._begin(task, due)
                self._counted_at, self._still_free = time.monotonic() + COUNTED_S, free - task.need
                continue
            try:
                self._end(*self._results.get(timeout=POLL_S))
            except queue.Empty:
                self._listener.poll("" if self._running else self._wait_for_others(due, total, free))

    def _wait_for_others(self, due: Sequence[Task], total: int, free: int) -> str:
        """Gives up the tasks that have waited too long, and returns what the first of the others needs."""
        found = f"{free} of {total} devices are free"
        kept = []
        for task in due:
            if self._waited_too_long(task):
                self._waiting.remove(task)
                self._fail(task, _gave_up(f"it needs {task.need}, and {found}"))
            else:
                kept.append(task)
        return f"{found}; {kept[0].name} needs {kept[0].need}" if kept else ""

    def _waited_too_long(self, task: Task) -> bool:
        now = time.monotonic()
        return now > self._waiting_since.setdefault(task.name, now) + MAX_WAIT_S

    def _due(self) -> list[Task]:
        """Returns the tasks that only wait for devices, in their order of start."""
        due = [task for task in self._waiting if not (set(task.after) & self._names) - self._done]
        return in_order([task for task in due if time.monotonic() >= self._not_before.get(task.name, 0.0)])

    def _next(self, due: Sequence[Task], total: int, free: int) -> Task | None:
        ours = sum(task.need for task in self._running)
        # keep the devices of a failed task for its retry
        pausing = sum(task.need for task in self._waiting if task.name in self._to_retry and task not in due)
        return select_task(due, min(free, total - ours) - pausing, min(free + ours, total), self._passed)

    def _begin(self, task: Task, due: Sequence[Task]) -> None:
        for passed in due[: due.index(task)]:
            self._passed[passed.name] += 1
        self._waiting.remove(task)
        taken = {at for ids in self._running.values() for at in ids}
        free = (at for at in range(len(taken) + task.need) if at not in taken)
        ids = tuple(next(free) for _ in range(task.need))
        self._running[task] = ids
        self._attempts[task.name] += 1
        self._to_retry.discard(task.name)
        self._listener.started(task)
        threading.Thread(target=self._run, args=(task, ids), daemon=True).start()

    def _run(self, task: Task, ids: tuple[int, ...]) -> None:
        error: BaseException | None = None
        try:
            task.work(ids)
        except BaseException as caught:
            error = caught
        self._results.put((task, error))

    def _end(self, task: Task, error: BaseException | None) -> None:
        del self._running[task]
        self._still_free += task.need
        if error is None:
            self._waiting_since.clear()
            self._done.add(task.name)
            self._listener.ended(task, None, self._attempts[task.name])
            return
        verdict = decide_retry(error)
        if verdict == RetryDecision.WHEN_FREE:  # it never started
            self._attempts[task.name] -= 1
            if self._waited_too_long(task):
                error, verdict = _gave_up(f"it needs {task.need}; {message_of(error)}"), RetryDecision.NO
        else:
            self._waiting_since.clear()
        if verdict == RetryDecision.NO or self._attempts[task.name] >= MAX_ATTEMPTS:
            self._fail(task, error)
            return
        self._waiting.append(task)
        self._not_before[task.name] = time.monotonic() + PAUSE_S
        if verdict == RetryDecision.AGAIN:
            self._to_retry.add(task.name)
        self._listener.postponed(task, error, verdict, self._attempts[task.name])

    def _fail(self, task: Task, error: BaseException) -> None:
        self._failed_tasks.add(task.name)
        self._listener.ended(task, error, self._attempts[task.name])

    def _drop_blocked(self) -> None:
        while blocked := [task for task in self._waiting if self._failed_tasks & set(task.after)]:
            for task in blocked:
                why = " and ".join(sorted(self._failed_tasks & set(task.after)))
                self._waiting.remove(task)
                self._fail(task, WorkerError(f"not started, because {why} failed"))


def _gave_up(found: str) -> PlacementError:
    return PlacementError(
        f"others held its devices for {MAX_WAIT_S / 3600:.0f} hours: {found}; run the sweep again when more are free"
    )
