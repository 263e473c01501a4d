"""The life of a run over a store that fails at a chosen call: saves, a resume, a fork, a second driver.

Each life is lived once for each call that an undisturbed one makes. The call fails in one of five ways, or a second
driver comes before it and takes the run over. Afterwards all is healthy, and the next resume must find the checkpoint
that was published last. A disk whose power is cut is in ``power_cut_model.py``.
"""

import tempfile
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

from launch.runs.checkpoints import check_published, note_published
from launch.runs.store import RunFolder
from suite.errors import CheckpointError
from suite.training.checkpoint import Saver, Storage, abandon_later, current, in_order, storage
from suite.training.checkpoint.async_save import AsyncSave, folder_of
from tests.suite.training.checkpoint.saves import LAYERS, Counting, newest_of, step_of

WAYS = ("once", "retries", "for ever", "hidden", "crash")
"""A call fails once, or until the third try, or as all later ones; or a listing lacks its newest entry; or the process
ends there."""


class Crash(BaseException):
    """The process ends."""


class EndingSave(AsyncSave):
    """A save that has ended also when its thread crashed: no save point waits for a dead thread.

    A short deadline would do that too, but on a busy machine it gives up saves that are alive. They then go on beside
    the next part of the life, and what is found depends on the speed of the machine.
    """

    def _run(self):
        try:
            super()._run()
        finally:
            self._written.set()
            self._ended.set()


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
        if name not in ("ls", "info", "cat_file", "pipe_file", "rm_file", "rm"):
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


class Meeting(Calls):
    """Calls of a driver, before one of which a second driver does its work."""

    def __init__(self, meet_at, second):
        super().__init__()
        self._meet_at, self._second, self.met_at = meet_at, second, ""

    def next(self, what):
        """Counts a call."""
        with self._lock:
            self.count += 1
            meets = self.count == self._meet_at
        if meets:
            self.met_at = what
            self._second()
        return False


class Life:
    """A run over a store. ``published`` are the steps that it has said to be published, since the last fork."""

    def __init__(self, worker, location, calls, folder, make_storage=FailingStorage):
        self.worker, self.location, self.make_storage = worker, location, partial(make_storage, calls)
        self.storage = self.make_storage(location)
        self.calls, self.published, self.run = calls, [], RunFolder(Path(folder))
        self.saving = 0
        """The step of the last save."""
        self.left = None
        """The newest step when the run continued from an earlier one."""

    def publish(self, step):
        self.published.append(step)
        note_published(self.run, step)

    def driver(self, owner, start):
        return Saver(
            self.storage, self.worker.update, lambda units: {}, lambda text: None, start,
            owner=owner, on_published=self.publish,
        )  # fmt: skip

    def save(self, saver, step, best=False):
        if self.calls.crashed:
            raise Crash
        self.worker.become(step)
        self.saving = step
        with patch("suite.training.checkpoint.writing.AsyncSave", EndingSave):
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

        with (
            patch("suite.training.checkpoint.reading.Storage", self.make_storage),
            patch("launch.runs.checkpoints.Storage", self.make_storage),
        ):
            found = newest_of(self.location, select=select)
        return 0 if found is None else found.step

    def go_on(self, least=0):
        """Resumes, and saves two more steps. Raises AssertionError if a step before ``least`` is resumed."""
        begin = self.load()
        assert begin >= least, f"step {begin} after {least} was published"
        saver = self.driver("b", begin)
        for step in (begin + 1, begin + 2):
            self.save(saver, step)

    def live(self):
        first = self.driver("a", 0)
        for step in (1, 2, 3):
            self.save(first, step, best=step == 2)
        begin = self.load()
        second = self.driver("b", begin)
        self.save(second, begin + 1)
        earlier = folder_of(begin - 1) in self.storage.folders()  # later steps then lie beyond its first checkpoint
        fork = self.load(begin - 1 if earlier else begin)
        self.left, self.published = max(self.published), [fork]
        abandon_later(self.storage, fork)
        third = self.driver("c", fork)
        self.worker.become(begin + 2)
        before = list(self.published)
        second.save(begin + 2, 0)  # the driver that lost the checkpoints
        second.wait()
        assert self.published == before, "a driver that lost the checkpoints has published"
        self.save(third, fork + 1)


def lived(worker, location, calls, live=Life.live):
    """Lives a life, to its end or a failure; returns (the life, how it ended)."""
    with tempfile.TemporaryDirectory() as folder:
        life = Life(worker, location, calls, folder)
        try:
            live(life)
        except (CheckpointError, OSError):
            return life, "ended with an error"
        except Crash:
            return life, "crashed"
        return life, "whole"


def outcome(worker, location, fail_at=None, way="once"):
    """Returns (calls made, what became of the run). Raises AssertionError if it lost a published checkpoint."""
    calls = Calls(fail_at, way)
    life, ended = lived(worker, location, calls)
    step = step_of(newest_of(location))
    assert step >= max(life.published, default=0), f"call {fail_at} {way}: step {step} after {life.published}"
    if life.left is not None and len(life.published) == 1:  # it can still go back
        assert newest_of(location, select=partial(in_order, choice=life.left, place="the run"))
    return calls.count, ended


def fail_everywhere(rank, world, rendezvous, every):
    """Lives once for each way and each ``every``-th call. Returns how often a life ended in which way."""
    worker, outcomes = ready(rank, world, rendezvous), Counter()
    total, ended = outcome(worker, "memory://model/undisturbed")
    assert ended == "whole"
    for way in WAYS:
        for fail_at in range(1, total + 1, every):
            _, ended = outcome(worker, f"memory://model/{way}-{fail_at}", fail_at, way)
            outcomes[way, ended] += 1
    return total, dict(outcomes)


def ready(*joined):
    """Returns a worker in a process where no retry pauses, and a save's thread may end with its process."""
    storage.PAUSES_S = (0.0, 0.0)
    threading.excepthook = lambda arguments: None
    return Counting(*joined, "memory://model/first")


def meet(worker, location, saves, meet_at=None):
    """Returns (calls made, who wrote the newest checkpoint): a driver saves three steps, and before one of its calls a
    second one resumes its run and saves ``saves`` steps. Its values are half a step more. Raises AssertionError if the
    second one's last checkpoint is lost."""
    published = []

    def second():
        found = newest_of(location)
        begin = 0 if found is None else found.step
        saver = Saver(
            Storage(location), worker.update, lambda units: {}, lambda text: None, begin,
            owner="b", on_published=published.append,
        )  # fmt: skip
        for step in range(begin + 1, begin + 1 + saves):
            worker.become(step + 0.5)
            saver.save(step, 0)
            saver.wait()
        worker.become(life.saving)

    calls = Meeting(meet_at, second)
    with tempfile.TemporaryDirectory() as folder, suppress(CheckpointError, OSError):
        life = Life(worker, location, calls, folder)
        first = life.driver("a", 0)
        for step in (1, 2, 3):
            life.save(first, step, best=step == 1)
    found = newest_of(location)
    (value,) = {float(number) for layer in range(LAYERS) for v in found.read(layer).values() for number in v.unique()}
    assert value in (found.step, found.step + 0.5), (meet_at, calls.met_at, found.step, value)
    # equal if the first one had looked who owns the checkpoints and was about to write its manifest of the same step;
    # greater if it claims them only now
    assert found.step >= max(published, default=0), (meet_at, calls.met_at, found.step, published)
    return calls.count, "second" if value % 1 else "first"


def meet_everywhere(rank, world, rendezvous, every):
    """Lets a second driver come at each ``every``-th call, and save one to three steps. Returns how often each of the
    two wrote the newest checkpoint."""
    worker = ready(rank, world, rendezvous)
    total, _ = meet(worker, "memory://meet/alone", 0)
    return Counter(
        meet(worker, f"memory://meet/{saves}-{meet_at}", saves, meet_at)[1]
        for saves in (1, 2, 3)
        for meet_at in range(1, total + 1, every)
    )
