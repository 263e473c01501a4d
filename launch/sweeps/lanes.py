"""Tasks side by side on the devices there are, which others may use too.

8 devices   others   ------                  -----------------   2 of them, then none, then 3
            t128     ======================                      needs 6: begun first, of equals the larger
                                             t64 ============    needs 4
                                             de =====  score     needs 1: what is left over goes to the next that fits

Higher priority first, then the larger need, then the order of the list; one that does not fit is passed over by those
behind it, four times. From then on what is freed is kept for it, so that it is not passed over for ever; but only while
it would fit if our own were done: nothing is kept idle for what others hold. A task that failed by no fault of a user
is begun again (``launch/sweeps/retries.py``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.sweeps.retries import BEGUN_AT_MOST, PAUSE_S, Again, again
from suite.errors import PlacementError, WorkerError

PERIOD = 0.5
"""Seconds between two looks."""

PASSED_OVER = 4
"""So many tasks are begun before one that is due but does not fit; then devices are kept for it."""

PATIENCE_S = 86400.0
"""Seconds for which a sweep none of whose tasks is at work waits for devices that others hold: within a day somebody
reads what it says."""


@dataclass(frozen=True)
class Task:
    """Something to be done in a thread of its own, whose work is done by processes."""

    name: str
    need: int
    """Devices."""
    work: Callable[[tuple[int, ...]], None]
    """Is told which devices are its own, by number, as far as it is the sweep that deals them out."""
    after: tuple[str, ...] = ()
    """Names of tasks that must have been done before; where one of them failed, this one is not begun."""
    priority: int = 0
    placed: Callable[[], bool] = bool
    """Whether what counts the devices sees those of this task as taken already: some seconds after it was begun."""


@dataclass(frozen=True)
class Share:
    """The devices of a cluster at one moment."""

    total: int
    held: int = 0
    """By whomever, ourselves included."""


class Room(Protocol):
    """Says what devices there are."""

    def look(self) -> Share:
        """Returns the devices there are now."""


@dataclass(frozen=True)
class Situation:
    """What the runner sees at a look."""

    total: int
    others: int
    """Devices that others hold, at most: some of them our own where a task has them and was not seen at work yet."""
    others_surely: int
    """Devices that others hold even if all of our tasks have theirs."""
    waiting: tuple[Task, ...]
    """Tasks that would be begun if there were devices."""


def in_order(tasks: Sequence[Task]) -> list[Task]:
    """Returns tasks as they are due."""
    return sorted(tasks, key=lambda task: (-task.priority, -task.need))


def choose(due: Sequence[Task], free: int, reachable: int, passed: Mapping[str, int]) -> Task | None:
    """Returns the task to begin now, of those due and in their order; None where all must wait.

    ``free`` devices are free, ``reachable`` would be if our own tasks were done; ``passed`` counts how often each was
    passed over.
    """
    for task in due:
        if task.need <= free:
            return task
        if task.need <= reachable and passed.get(task.name, 0) >= PASSED_OVER:
            return None
    return None


class Hears:
    """What is told of tasks. Each does nothing here."""

    def begun(self, task: Task) -> None:
        """One was begun, for the first time or again."""

    def put_off(self, task: Task, error: BaseException, verdict: Again) -> None:
        """One failed, and is begun again later."""

    def ended(self, task: Task, error: BaseException | None) -> None:
        """One was done, or failed for good."""

    def look(self, now: Situation) -> None:
        """Twice a second."""


def run_tasks(tasks: Sequence[Task], room: Room, hears: Hears) -> None:
    """Runs all tasks; one that fails takes none but those after it with it.

    Threads are daemons: an interrupt ends the wait here at once, and what the tasks started is the caller's to end.
    """
    _Lanes(tasks, room, hears).run()


class _Lanes:
    def __init__(self, tasks: Sequence[Task], room: Room, hears: Hears) -> None:
        self._room, self._hears = room, hears
        self._waiting = list(tasks)
        self._names = {task.name for task in tasks}
        self._running: dict[str, tuple[Task, tuple[int, ...]]] = {}
        self._done: set[str] = set()
        self._broken: set[str] = set()
        self._begun: dict[str, int] = {}
        self._passed: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._busy_since: dict[str, float] = {}
        self._failed: set[str] = set()
        self._news: queue.Queue[tuple[Task, BaseException | None]] = queue.Queue()
        self._still_since: float | None = None

    def run(self) -> None:
        while self._waiting or self._running:
            self._drop_what_cannot_begin()
            now = self._situation()
            task = self._next(now)
            if task is not None:
                self._begin(task, now)
                continue
            self._give_up_in_time(now)
            try:
                self._end(*self._news.get(timeout=PERIOD))
            except queue.Empty:
                self._hears.look(now)

    def _situation(self) -> Situation:
        share = self._room.look()
        ours = _needs(task for task, _ in self._running.values())
        placed = _needs(task for task, _ in self._running.values() if task.placed())
        due = [task for task in self._waiting if not (set(task.after) & self._names) - self._done]
        rested = [task for task in due if time.monotonic() >= self._not_before.get(task.name, 0.0)]
        others, surely = max(0, share.held - placed), max(0, share.held - ours)
        return Situation(share.total, others, surely, tuple(in_order(rested)))

    def _next(self, now: Situation) -> Task | None:
        reachable = now.total - now.others
        # what failed comes back to the devices that it had
        pausing = (task for task in self._waiting if task.name in self._failed and task not in now.waiting)
        taken = _needs(task for task, _ in self._running.values()) + _needs(pausing)
        return choose(now.waiting, reachable - taken, reachable, self._passed)

    def _begin(self, task: Task, now: Situation) -> None:
        for one in now.waiting[: now.waiting.index(task)]:
            self._passed[one.name] = self._passed.get(one.name, 0) + 1
        self._waiting.remove(task)
        taken = {at for _, ids in self._running.values() for at in ids}
        free = (at for at in range(len(taken) + task.need) if at not in taken)
        ids = tuple(next(free) for _ in range(task.need))
        self._running[task.name] = task, ids
        self._begun[task.name] = self._begun.get(task.name, 0) + 1
        self._failed.discard(task.name)
        self._still_since = None
        self._hears.begun(task)
        threading.Thread(target=self._run, args=(task, ids), daemon=True).start()

    def _run(self, task: Task, ids: tuple[int, ...]) -> None:
        try:
            task.work(ids)
        except BaseException as error:
            self._news.put((task, error))
        else:
            self._news.put((task, None))

    def _end(self, task: Task, error: BaseException | None) -> None:
        del self._running[task.name]
        verdict, now = again(error) if error is not None else Again.NO, time.monotonic()
        in_time = now < self._busy_since.setdefault(task.name, now) + PATIENCE_S
        if verdict == Again.WHEN_FREE and in_time:  # it was never at work
            self._begun[task.name] -= 1
        else:
            del self._busy_since[task.name]
        if error is not None and verdict != Again.NO and in_time and self._begun[task.name] < BEGUN_AT_MOST:
            self._waiting.append(task)
            self._not_before[task.name] = now + PAUSE_S
            if verdict == Again.AGAIN:
                self._failed.add(task.name)
            self._hears.put_off(task, error, verdict)
            return
        (self._done if error is None else self._broken).add(task.name)
        self._hears.ended(task, error)

    def _drop_what_cannot_begin(self) -> None:
        while late := [task for task in self._waiting if self._broken & set(task.after)]:
            for task in late:
                why = " and ".join(sorted(self._broken & set(task.after)))
                self._drop(task, WorkerError(f"not begun, since {why} failed"))

    def _drop(self, task: Task, error: BaseException) -> None:
        self._waiting.remove(task)
        self._broken.add(task.name)
        self._hears.ended(task, error)

    def _give_up_in_time(self, now: Situation) -> None:
        """Ends the wait for devices that others have held for too long, while nothing of ours was at work."""
        if self._running or not now.waiting:
            self._still_since = None
            return
        self._still_since = self._still_since or time.monotonic()
        if time.monotonic() < self._still_since + PATIENCE_S:
            return
        for task in now.waiting:
            told = (
                f"it needs {task.need} devices, the cluster has {now.total}, of which others have held "
                f"{now.others_surely} for {PATIENCE_S / 3600:.0f} hours; run the sweep again when they are free"
            )
            self._drop(task, PlacementError(told))


def _needs(tasks: Iterable[Task]) -> int:
    return sum(task.need for task in tasks)
