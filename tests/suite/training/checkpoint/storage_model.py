"""A store that fails at a chosen call, and the life of a run over it: saves, a resume, a fork, a second driver.

Each life is lived once for each call of the store that an undisturbed one makes, which then fails in one of five ways.
Afterwards the store is healthy, and the next resume must find a published checkpoint, never an older one than it may.
"""

import tempfile
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from launch.runs.checkpoints import check_published, note_published
from launch.runs.store import RunFolder
from suite.errors import CheckpointError
from suite.training.checkpoint import Saver, Storage, abandon_later, current, in_order, newest_valid, storage
from tests.suite.training.checkpoint.saves import LAYERS, Counting

WAYS = ("once", "retries", "for ever", "hidden", "crash")
"""A call fails once, or until the third try, or as all later ones; or a listing lacks its newest entry; or the process
ends there."""


DEADLINE_S = 0.3
"""How long a save point waits for a thread that has crashed."""


class Crash(BaseException):
    """The process ends."""


class Calls:
    """Counts the calls of the store, and fails at one of them."""

    def __init__(self, fail_at=None, way="once"):
        self.count, self._fail_at, self._way, self._lock = 0, fail_at, way, threading.Lock()
        self.crashed = False

    def next(self, what):
        """Counts a call. Raises when it must fail; returns whether its result must lack the newest entry."""
        with self._lock:
            self.count += 1
            after = None if self._fail_at is None else self.count - self._fail_at
        if after is None or after < 0 or self._way == "hidden":
            return after == 0
        if self._way == "crash":
            self.crashed = True
            raise Crash(what)
        if {"once": after == 0, "retries": after < 3, "for ever": True}[self._way]:
            raise OSError(f"503 at {what}")
        return False


class Failing:
    """A file system whose calls are counted, and fail when it is their turn."""

    def __init__(self, files, calls):
        self._files, self._calls = files, calls

    def __getattr__(self, name):
        call = getattr(self._files, name)
        if name not in ("ls", "isdir", "info", "cat_file", "pipe_file", "rm_file", "rm"):
            return call

        def counted(*arguments, **options):
            hides = self._calls.next(f"{name} {arguments[0]}")
            found = call(*arguments, **options)
            return sorted(found)[:-1] if hides and name == "ls" else found

        return counted


class FailingStorage(Storage):
    """A place on the failing store."""

    def __init__(self, calls, location):
        super().__init__(location)
        self._files = Failing(self._files, calls)


class Life:
    """A run over a store. ``published`` are the steps that it has said to be published, since the last fork."""

    def __init__(self, worker, location, calls, folder):
        self.worker, self.location, self.storage = worker, location, FailingStorage(calls, location)
        self.calls, self.published, self.run = calls, [], RunFolder(Path(folder))
        self.left = None
        """The newest step when the run continued from an earlier one."""

    def publish(self, step):
        self.published.append(step)
        note_published(self.run, step)

    def driver(self, owner, start):
        return Saver(
            self.storage, self.worker.update, lambda units: {}, lambda text: None, start, DEADLINE_S,
            owner=owner, on_published=self.publish,
        )  # fmt: skip

    def save(self, saver, step, best=False):
        if self.calls.crashed:
            raise Crash
        self.worker.become(step)
        saver.save(step, 0, best)
        saver.wait()
        if self.calls.crashed:
            raise Crash

    def load(self, step=None):
        """Returns the step to resume from, as a worker does."""

        def select(checkpoints):
            if step is not None:
                return in_order(checkpoints, step, "the run")
            check_published(self.run, self.location)
            return current(checkpoints)

        failing = partial(FailingStorage, self.calls)
        with (
            patch("suite.training.checkpoint.reading.Storage", failing),
            patch("launch.runs.checkpoints.Storage", failing),
        ):
            found = newest_valid(self.location, range(LAYERS), LAYERS, lambda text: None, select)
        return 0 if found is None else found.step

    def live(self):
        first = self.driver("a", 0)
        for step in (1, 2, 3):
            self.save(first, step, best=step == 2)
        begin = self.load()
        second = self.driver("b", begin)
        self.save(second, begin + 1)
        fork = self.load(begin)
        self.left, self.published = max(self.published), [fork]
        abandon_later(self.storage, fork)
        third = self.driver("c", fork)
        self.worker.become(begin + 2)
        before = list(self.published)
        second.save(begin + 2, 0)  # the driver that lost the checkpoints
        second.wait()
        assert self.published == before, "a driver that lost the checkpoints has published"
        self.save(third, begin + 3)


def outcome(worker, location, fail_at=None, way="once"):
    """Returns (calls made, what became of the run). Raises AssertionError if it lost a published checkpoint."""
    calls, ended = Calls(fail_at, way), "whole"
    with tempfile.TemporaryDirectory() as folder:
        life = Life(worker, location, calls, folder)
        try:
            life.live()
        except (CheckpointError, OSError):
            ended = "ended with an error"
        except Crash:
            ended = "crashed"
    found = newest_valid(location, range(LAYERS), LAYERS, lambda text: None)
    if life.published:
        assert found is not None, f"call {fail_at} {way}: step 0 after {life.published} were published"
        assert found.step >= max(life.published), f"call {fail_at} {way}: step {found.step} after {life.published}"
    if life.left is not None and len(life.published) == 1:  # it can still go back
        assert newest_valid(
            location, range(LAYERS), LAYERS, print, partial(in_order, choice=life.left, place="the run")
        )
    if found is not None:
        for layer in range(LAYERS):
            for name, value in found.read(layer).items():
                assert bool((value == found.step).all()), (fail_at, way, found.step, name)
    return calls.count, ended


def fail_everywhere(rank, world, rendezvous, every):
    """Lives once for each way and each ``every``-th call. Returns how often a life ended in which way."""
    worker, outcomes = Counting(rank, world, rendezvous, "memory://model/first"), Counter()
    storage.PAUSES_S = (0.0, 0.0)
    threading.excepthook = lambda arguments: None  # a save's thread that ends with its process
    torch.set_num_threads(1)
    total, ended = outcome(worker, "memory://model/undisturbed")
    assert ended == "whole"
    for way in WAYS:
        for fail_at in range(1, total + 1, every):
            _, ended = outcome(worker, f"memory://model/{way}-{fail_at}", fail_at, way)
            outcomes[way, ended] += 1
    return total, dict(outcomes)
