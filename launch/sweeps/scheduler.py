"""Runs tasks concurrently on devices that others may use too.

8 devices   others   ------                  -----------------   2 of them, then none, then 3
            t128     ======================                      needs 6: starts first, the larger of equal priority
                                             t64 ============    needs 4
                                             de =====  score     needs 1: fills the remaining device

The order is by priority, then by need (larger first), then by position in the list. Smaller tasks may pass a task that
does not fit four times; then freed devices are reserved for it, but only if it would fit without our own running tasks:
no device idles because of what others hold. Tasks that fail without a user's fault are retried
(``launch/sweeps/retries.py``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.sweeps.retries import MAX_ATTEMPTS, PAUSE_S, RetryDecision, decide_retry
from suite.errors import PlacementError, WorkerError

POLL_S = 0.5
"""Seconds between two polls."""

MAX_PASSED_OVER = 4
"""So many tasks may start before an earlier one that does not fit; then devices are reserved for it."""

MAX_WAIT_S = 86400.0
"""Seconds that a sweep without running tasks waits for devices that others hold: long enough for a person to notice."""


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
    placed: Callable[[], bool] = bool
    """Whether the device count already includes this task's devices: some seconds after its start."""


@dataclass(frozen=True)
class DeviceUsage:
    """A cluster's devices at one moment."""

    total: int
    held: int = 0
    """In use, by anyone including this sweep."""


class DevicePool(Protocol):
    """Reports the available devices."""

    def usage(self) -> DeviceUsage:
        """Returns the current devices."""


@dataclass(frozen=True)
class SchedulerState:
    """The state that the scheduler sees at a poll."""

    total: int
    others: int
    """Upper bound of the devices held by others: it includes those of our tasks that are not ``placed`` yet."""
    others_min: int
    """Lower bound of the devices held by others: as if all our tasks already held theirs."""
    waiting: tuple[Task, ...]
    """Tasks that only wait for devices."""


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

    def poll(self, now: SchedulerState) -> None:
        """Called at every poll."""


def run_tasks(tasks: Sequence[Task], device_pool: DevicePool, listener: SchedulerListener) -> None:
    """Runs all tasks; a failure only affects tasks that come after it.

    Threads are daemons: an interrupt ends the wait at once, and the caller must end the tasks' processes.
    """
    _Scheduler(tasks, device_pool, listener).run()


class _Scheduler:
    def __init__(self, tasks: Sequence[Task], device_pool: DevicePool, listener: SchedulerListener) -> None:
        self._device_pool, self._listener = device_pool, listener
        self._waiting = list(tasks)
        self._names = {task.name for task in tasks}
        self._running: dict[str, tuple[Task, tuple[int, ...]]] = {}
        self._done: set[str] = set()
        self._failed_tasks: set[str] = set()
        self._attempts: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        self._first_end: dict[str, float] = {}
        self._to_retry: set[str] = set()
        self._results: queue.Queue[tuple[Task, BaseException | None]] = queue.Queue()
        self._idle_since: float | None = None

    def run(self) -> None:
        while self._waiting or self._running:
            self._drop_blocked()
            now = self._state()
            task = self._next(now)
            if task is not None:
                self._begin(task, now)
                continue
            self._give_up_waiting(now)
            try:
                self._end(*self._results.get(timeout=POLL_S))
            except queue.Empty:
                self._listener.poll(now)

    def _state(self) -> SchedulerState:
        usage = self._device_pool.usage()
        ours = _needs(task for task, _ in self._running.values())
        placed = _needs(task for task, _ in self._running.values() if task.placed())
        due = [task for task in self._waiting if not (set(task.after) & self._names) - self._done]
        ready = [task for task in due if time.monotonic() >= self._not_before.get(task.name, 0.0)]
        others, surely = max(0, usage.held - placed), max(0, usage.held - ours)
        return SchedulerState(usage.total, others, surely, tuple(in_order(ready)))

    def _next(self, now: SchedulerState) -> Task | None:
        reachable = now.total - now.others
        # keep the devices of a failed task for its retry
        pausing = (task for task in self._waiting if task.name in self._to_retry and task not in now.waiting)
        taken = _needs(task for task, _ in self._running.values()) + _needs(pausing)
        return select_task(now.waiting, reachable - taken, reachable, self._passed)

    def _begin(self, task: Task, now: SchedulerState) -> None:
        for passed in now.waiting[: now.waiting.index(task)]:
            self._passed[passed.name] += 1
        self._waiting.remove(task)
        taken = {at for _, ids in self._running.values() for at in ids}
        free = (at for at in range(len(taken) + task.need) if at not in taken)
        ids = tuple(next(free) for _ in range(task.need))
        self._running[task.name] = task, ids
        self._attempts[task.name] += 1
        self._to_retry.discard(task.name)
        self._idle_since = None
        self._listener.started(task)
        threading.Thread(target=self._run, args=(task, ids), daemon=True).start()

    def _run(self, task: Task, ids: tuple[int, ...]) -> None:
        try:
            task.work(ids)
        except BaseException as error:
            self._results.put((task, error))
        else:
            self._results.put((task, None))

    def _end(self, task: Task, error: BaseException | None) -> None:
        del self._running[task.name]
        verdict, now = decide_retry(error) if error is not None else RetryDecision.NO, time.monotonic()
        in_time = now < self._first_end.setdefault(task.name, now) + MAX_WAIT_S
        if verdict == RetryDecision.WHEN_FREE and in_time:  # it never started
            self._attempts[task.name] -= 1
        else:
            del self._first_end[task.name]
        if error is not None and verdict != RetryDecision.NO and in_time and self._attempts[task.name] < MAX_ATTEMPTS:
            self._waiting.append(task)
            self._not_before[task.name] = now + PAUSE_S
            if verdict == RetryDecision.AGAIN:
                self._to_retry.add(task.name)
            self._listener.postponed(task, error, verdict, self._attempts[task.name])
            return
        (self._done if error is None else self._failed_tasks).add(task.name)
        self._listener.ended(task, error, self._attempts[task.name])

    def _drop_blocked(self) -> None:
        while blocked := [task for task in self._waiting if self._failed_tasks & set(task.after)]:
            for task in blocked:
                why = " and ".join(sorted(self._failed_tasks & set(task.after)))
                self._drop(task, WorkerError(f"not started, because {why} failed"))

    def _drop(self, task: Task, error: BaseException) -> None:
        self._waiting.remove(task)
        self._failed_tasks.add(task.name)
        self._listener.ended(task, error, self._attempts[task.name])

    def _give_up_waiting(self, now: SchedulerState) -> None:
        """Gives up on tasks after MAX_WAIT_S in which others held the devices and no task of ours ran."""
        if self._running or not now.waiting:
            self._idle_since = None
            return
        self._idle_since = self._idle_since or time.monotonic()
        if time.monotonic() < self._idle_since + MAX_WAIT_S:
            return
        for task in now.waiting:
            message = (
                f"it needs {task.need} of the cluster's {now.total} devices, and others have used {now.others_min} for "
                f"{MAX_WAIT_S / 3600:.0f} hours; run the sweep again when they are free"
            )
            self._drop(task, PlacementError(message))


def _needs(tasks: Iterable[Task]) -> int:
    return sum(task.need for task in tasks)
