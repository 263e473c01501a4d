"""The scheduler: device limits, order by priority and need, bounded passing over, failures and retries."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.sweeps import scheduler
from launch.sweeps.retries import MAX_ATTEMPTS, MemberError, RetryDecision, decide_retry
from launch.sweeps.scheduler import (
    MAX_PASSED_OVER,
    Scheduler,
    SchedulerListener,
    Task,
    in_order,
    select_task,
)
from suite.errors import (
    BusyError,
    CheckpointError,
    DataError,
    NonFiniteError,
    PlacementError,
    PlanError,
    SettingError,
    StallError,
    WorkerDiedError,
    WorkerError,
)


class Log(SchedulerListener):
    """Records concurrent tasks, devices and events."""

    def __init__(self):
        self.lock, self.now, self.most, self.order, self.result = threading.Lock(), 0, 0, [], {}
        self.again, self.devices = [], {}

    def task(self, name, need, fails=False, after=(), priority=0, failures=()):
        left = list(failures)

        def work(devices):
            with self.lock:
                self.now += need
                self.most = max(self.most, self.now)
                self.order.append(name)
                self.devices[name] = devices
            with self.lock:
                self.now -= need
            if left:
                raise left.pop(0)
            if fails:
                raise ValueError(name)

        return Task(name, need, work, tuple(after), priority)

    def ended(self, task, error, attempts):
        self.result[task.name] = error

    def postponed(self, task, error, verdict, attempts):
        self.again.append((task.name, verdict))


def run_tasks(tasks, device_pool, listener):
    Scheduler(tasks, device_pool, listener).run()


def own_devices(total):
    """This machine's devices, which nobody else uses."""
    return lambda: (total, total)


def shared_devices(total, held):
    """A cluster whose other users hold ``held`` devices, poll by poll."""
    left = list(held)
    return lambda: (total, total - (left.pop(0) if left else 0))


def waits(*needs, priority=0):
    return [Task(str(at), need, print, (), priority) for at, need in enumerate(needs)]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12), st.integers(4, 6))
def test_every_task_runs_once_within_the_devices(sizes, total):
    log = Log()
    run_tasks([log.task(str(at), *size) for at, size in enumerate(sizes)], own_devices(total), log)
    assert sorted(log.order) == sorted(map(str, range(len(sizes))))
    assert log.most <= total
    bad = {str(at) for at, (_, fails) in enumerate(sizes) if fails}
    assert {name for name, error in log.result.items() if error} == bad
    assert all(len(log.devices[str(at)]) == need for at, (need, _) in enumerate(sizes))
    assert all(0 <= device < total for devices in log.devices.values() for device in devices)


def test_tasks_that_fit_run_concurrently_on_different_devices_and_another_waits():
    meeting, third = threading.Barrier(2, timeout=20), threading.Event()
    seen, given_out = [], []

    def meet(devices):
        given_out.extend(devices)
        meeting.wait()  # a serial runner never gets here
        seen.append(third.is_set())
        meeting.wait()

    log = Log()
    run_tasks([Task("a", 2, meet), Task("b", 2, meet), Task("c", 1, lambda _: third.set())], own_devices(4), log)
    assert log.result == {"a": None, "b": None, "c": None}
    assert seen == [False, False]
    assert sorted(given_out) == [0, 1, 2, 3]


def test_the_order_is_by_priority_then_need_and_a_dependent_task_waits():
    log = Log()
    tasks = [
        log.task("small", 1), log.task("large", 2), log.task("score large", 1, after=["large"]),
        log.task("larger", 2), log.task("baseline", 2, priority=-1), log.task("first", 1, priority=1),
    ]  # fmt: skip
    run_tasks(tasks, own_devices(2), log)
    assert log.order.index("first") < log.order.index("large") < log.order.index("larger")
    assert log.order.index("large") < log.order.index("score large")
    assert log.order[-1] == "baseline"


def test_a_failure_only_affects_dependent_tasks():
    log = Log()
    tasks = [
        log.task("a", 1, fails=True), log.task("b", 1, after=["a"]), log.task("c", 1, after=["b"]), log.task("d", 1),
    ]  # fmt: skip
    run_tasks(tasks, own_devices(1), log)
    assert sorted(log.order) == ["a", "d"]
    assert str(log.result["a"]) == "a"
    assert log.result["d"] is None
    assert str(log.result["b"]) == "not started, because a failed"
    assert str(log.result["c"]) == "not started, because b failed"


def test_a_task_after_one_that_is_not_in_the_list_starts():
    log = Log()
    run_tasks([log.task("score", 1, after=["train"])], own_devices(2), log)
    assert log.order == ["score"]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (SettingError("x"), RetryDecision.NO),
        (DataError("x"), RetryDecision.NO),
        (CheckpointError("x"), RetryDecision.NO),
        (PlanError(["x"]), RetryDecision.NO),
        (NonFiniteError("x"), RetryDecision.NO),
        (KeyError("x"), RetryDecision.NO),
        (WorkerError("x"), RetryDecision.AGAIN),
        (WorkerDiedError(0, "killed"), RetryDecision.AGAIN),
        (StallError("x"), RetryDecision.AGAIN),
        (PlacementError("1 of 2 devices is left"), RetryDecision.AGAIN),
        (BusyError("x"), RetryDecision.WHEN_FREE),
        (MemberError("x", RetryDecision.NO), RetryDecision.NO),
        (MemberError("x", RetryDecision.AGAIN), RetryDecision.AGAIN),
    ],
)
def test_only_errors_that_are_not_the_users_are_retried(error, verdict):
    assert decide_retry(error) == verdict


def test_retries_are_limited_and_waiting_for_devices_does_not_count(monkeypatch):
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.0)
    log = Log()
    lost = WorkerError("lost")
    tasks = [
        log.task("recovers", 1, failures=[lost, BusyError("held"), BusyError("held"), BusyError("held"), lost]),
        log.task("fails", 1, failures=[lost] * 9),
        log.task("wrong", 1, failures=[SettingError("no")]),
        log.task("after", 1, after=["recovers", "fails"]),
    ]
    run_tasks(tasks, own_devices(1), log)
    assert log.order.count("recovers") == 6
    assert log.order.count("fails") == MAX_ATTEMPTS
    assert log.order.count("wrong") == 1
    assert (log.result["recovers"], log.result["fails"]) == (None, lost)
    assert str(log.result["after"]) == "not started, because fails failed"
    assert [verdict for name, verdict in log.again if name == "recovers"].count(RetryDecision.WHEN_FREE) == 3


def test_a_retried_task_starts_before_one_of_lower_priority(monkeypatch):
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.2)
    log = Log()
    tasks = [log.task("failed", 1, priority=1, failures=[WorkerError("lost")]), log.task("less", 1)]
    run_tasks(tasks, own_devices(1), log)
    assert log.order == ["failed", "failed", "less"]


def test_a_pool_that_does_not_count_a_started_task_yet_gives_its_devices_to_no_other(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.01)
    log, polls, release = Log(), [], threading.Event()

    def count():  # the first two polls miss task a
        polls.append(len(log.order))
        if len(polls) == 10:
            release.set()
        return 2, 2 if len(polls) < 3 or release.is_set() else 0

    run_tasks([Task("a", 2, lambda _: release.wait(20)), log.task("b", 1)], count, log)
    assert not any(polls[:10])
    assert log.result == {"a": None, "b": None}


def test_devices_of_others_stay_theirs_while_a_pool_does_not_count_a_started_task_yet(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.01)
    log, polls, release, counts_late = Log(), [], threading.Event(), 5

    def count():  # two of eight devices are others', and the first polls miss task a
        polls.append(list(log.order))
        if len(polls) == 10:
            release.set()
        return 8, 6 if len(polls) < counts_late or release.is_set() else 2

    run_tasks([Task("a", 4, lambda _: release.wait(20)), log.task("b", 4)], count, log)
    assert not any("b" in order for order in polls[:10])
    assert log.result == {"a": None, "b": None}


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.lists(st.integers(0, 6), max_size=4))
def test_devices_of_others_are_not_used_and_all_tasks_are_done(needs, held):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "POLL_S", 0.005)
        patch.setattr(scheduler, "COUNTED_S", 0.0)  # these devices are counted at once
        log = Log()
        run_tasks([log.task(str(at), need) for at, need in enumerate(needs)], shared_devices(4, held), log)
    assert sorted(log.result.items()) == [(str(at), None) for at in range(len(needs))]
    assert log.most <= 4


def test_a_task_waits_for_devices_of_others_and_the_numbers_are_shown(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.005)
    monkeypatch.setattr(scheduler, "COUNTED_S", 0.05)

    class PollLog(Log):
        shown = ()

        def poll(self, waiting_for):
            self.shown = (*self.shown, waiting_for)

    log = PollLog()
    run_tasks([log.task("large", 4), log.task("small", 1)], shared_devices(4, [3] * 50), log)
    assert log.order == ["small", "large"]  # it fits and does not wait
    assert set(log.shown) - {""} == {"1 of 4 devices are free; large needs 4"}


def test_a_wait_for_devices_of_others_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.005)
    monkeypatch.setattr(scheduler, "MAX_WAIT_S", 0.05)
    log = Log()
    run_tasks([log.task("large", 4), log.task("small", 1)], shared_devices(4, [3] * 1000), log)
    assert log.result["small"] is None  # it fits and does not wait
    with pytest.raises(PlacementError, match="it needs 4, and 1 of 4 devices are free; run the sweep again"):
        raise log.result["large"]


def test_a_task_whose_devices_others_always_take_first_is_given_up(monkeypatch):
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.01)
    monkeypatch.setattr(scheduler, "POLL_S", 0.005)
    monkeypatch.setattr(scheduler, "MAX_WAIT_S", 0.05)
    log = Log()
    tasks = [log.task("late", 2, failures=[BusyError("none is free")] * 1000), log.task("after", 1, after=["late"])]
    run_tasks(tasks, own_devices(2), log)
    with pytest.raises(PlacementError, match="it needs 2; none is free; run the sweep again"):
        raise log.result["late"]
    assert str(log.result["after"]) == "not started, because late failed"


def test_the_wait_begins_anew_when_a_task_of_the_sweep_ends(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.001)
    monkeypatch.setattr(scheduler, "MAX_WAIT_S", 30.0)
    log, polls, after = Log(), [], []
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: len(polls)))  # a poll a second

    def slow(devices):
        while len(polls) < 100:
            time.sleep(0.001)

    def count():  # 3 devices after 20 polls; when slow has ended, all after another 20
        polls.append(None)
        if "slow" not in log.result:
            return 4, 3 if len(polls) > 20 else 1
        after.append(None)
        return 4, 4 if len(after) > 20 else 1

    run_tasks([log.task("large", 4), Task("slow", 3, slow)], count, log)
    assert log.result == {"slow": None, "large": None}


TASKS = st.lists(st.tuples(st.integers(1, 8), st.integers(-1, 1)), min_size=1, max_size=12)


@given(TASKS, st.integers(0, 8), st.integers(0, 8), st.dictionaries(st.sampled_from("0123456789"), st.integers(0, 9)))
def test_the_chosen_task_fits_and_passes_over_only_tasks_that_do_not(sizes, free, ours, passed):
    due = in_order([Task(str(at), need, print, (), priority) for at, (need, priority) in enumerate(sizes)])
    assert all((a.priority, a.need) >= (b.priority, b.need) for a, b in pairwise(due))
    chosen = select_task(due, free, free + ours, passed)
    before = due if chosen is None else due[: due.index(chosen)]
    waited_long = [task for task in before if task.need <= free + ours and passed.get(task.name, 0) >= MAX_PASSED_OVER]
    if chosen is None:
        assert waited_long or not any(task.need <= free for task in due)
    else:
        assert chosen.need <= free
        assert not waited_long
        assert not any(task.need <= free for task in before)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9)), min_size=1, max_size=40), st.data())
def test_no_task_is_passed_over_more_often_than_the_limit(arrivals, data):
    """A simulation in steps: tasks arrive one by one and take several steps; others hold nothing."""
    passed, due, running, chosen = {}, [], [], []
    arriving = [Task(str(at), need, print) for at, (need, _) in enumerate(arrivals)]
    lasts = {str(at): length for at, (_, length) in enumerate(arrivals)}
    for _ in range(500):
        if arriving and (data.draw(st.booleans()) or not (due or running)):
            due.append(arriving.pop(0))
        free = 8 - sum(task.need for task, _ in running)
        assert free >= 0
        order = in_order(due)
        task = select_task(order, free, 8, passed)
        if task is not None:
            for earlier in order[: order.index(task)]:
                passed[earlier.name] = passed.get(earlier.name, 0) + 1
            due.remove(task)
            running.append((task, lasts[task.name]))
            chosen.append(task.name)
            continue
        running = [(task, left - 1) for task, left in running if left > 1]
        if not (arriving or due or running):
            break
    assert sorted(chosen) == sorted(lasts)
    assert max(passed.values(), default=0) <= MAX_PASSED_OVER


def test_no_devices_are_reserved_for_a_task_that_would_not_fit_without_our_own_tasks():
    large, small = waits(6, 2)
    assert select_task([large, small], 2, 8, {"0": MAX_PASSED_OVER}) is None
    assert select_task([large, small], 2, 5, {"0": MAX_PASSED_OVER}) is small
