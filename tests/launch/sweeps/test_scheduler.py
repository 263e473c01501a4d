"""Several tasks at once: never more devices than there are, by priority and need, nothing passed over for ever, a
failure takes only what needs it, and what was no user's fault is tried again."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.sweeps import scheduler
from launch.sweeps.devices import LocalDevicePool
from launch.sweeps.retries import MAX_ATTEMPTS, MemberError, RetryDecision, decide_retry
from launch.sweeps.scheduler import MAX_PASSED_OVER, DeviceUsage, SchedulerListener, Task, choose, in_order, run_tasks
from suite.errors import (
    BusyError,
    CheckpointError,
    DataError,
    DiedError,
    NumbersError,
    PlacementError,
    PlanError,
    SettingError,
    StallError,
    WorkerError,
)


class Log(SchedulerListener):
    """Notes what was at work at the same time, and what is told."""

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

    def ended(self, task, error):
        self.result[task.name] = error

    def postponed(self, task, error, verdict):
        self.again.append((task.name, verdict))


def waits(*needs, priority=0):
    return [Task(str(at), need, print, (), priority) for at, need in enumerate(needs)]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12), st.integers(4, 6))
def test_every_task_is_done_once_in_the_room_there_is(sizes, room):
    log = Log()
    run_tasks([log.task(str(at), *size) for at, size in enumerate(sizes)], LocalDevicePool(room), log)
    assert sorted(log.order) == sorted(map(str, range(len(sizes))))
    assert log.most <= room
    bad = {str(at) for at, (_, fails) in enumerate(sizes) if fails}
    assert {name for name, error in log.result.items() if error} == bad
    assert all(len(log.devices[str(at)]) == need for at, (need, _) in enumerate(sizes))
    assert all(0 <= device < room for devices in log.devices.values() for device in devices)


def test_two_that_fit_are_at_work_at_once_on_devices_of_their_own_and_a_third_waits_for_room():
    meeting, third = threading.Barrier(2, timeout=20), threading.Event()
    seen, given_out = [], []

    def meet(devices):
        given_out.extend(devices)
        meeting.wait()  # a serial runner never gets here
        seen.append(third.is_set())
        meeting.wait()

    log = Log()
    run_tasks([Task("a", 2, meet), Task("b", 2, meet), Task("c", 1, lambda _: third.set())], LocalDevicePool(4), log)
    assert log.result == {"a": None, "b": None, "c": None}
    assert seen == [False, False]
    assert sorted(given_out) == [0, 1, 2, 3]


def test_priority_then_need_is_the_order_and_what_comes_after_waits():
    log = Log()
    tasks = [
        log.task("small", 1), log.task("large", 2), log.task("score large", 1, after=["large"]),
        log.task("larger", 2), log.task("baseline", 2, priority=-1), log.task("first", 1, priority=1),
    ]  # fmt: skip
    run_tasks(tasks, LocalDevicePool(2), log)
    assert log.order.index("first") < log.order.index("large") < log.order.index("larger")
    assert log.order.index("large") < log.order.index("score large")
    assert log.order[-1] == "baseline"


def test_a_failure_takes_what_comes_after_it_and_nothing_else():
    log = Log()
    tasks = [
        log.task("a", 1, fails=True), log.task("b", 1, after=["a"]), log.task("c", 1, after=["b"]), log.task("d", 1),
    ]  # fmt: skip
    run_tasks(tasks, LocalDevicePool(1), log)
    assert sorted(log.order) == ["a", "d"]
    assert str(log.result["a"]) == "a"
    assert log.result["d"] is None
    assert str(log.result["b"]) == "not started, because a failed"
    assert str(log.result["c"]) == "not started, because b failed"


def test_a_task_after_one_that_is_not_in_the_list_may_begin():
    log = Log()
    run_tasks([log.task("score", 1, after=["train"])], LocalDevicePool(2), log)
    assert log.order == ["score"]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (SettingError("x"), RetryDecision.NO),
        (DataError("x"), RetryDecision.NO),
        (CheckpointError("x"), RetryDecision.NO),
        (PlanError(["x"]), RetryDecision.NO),
        (NumbersError("x"), RetryDecision.NO),
        (KeyError("x"), RetryDecision.NO),
        (WorkerError("x"), RetryDecision.AGAIN),
        (DiedError(0, "killed"), RetryDecision.AGAIN),
        (StallError("x"), RetryDecision.AGAIN),
        (PlacementError("1 of 2 devices is left"), RetryDecision.AGAIN),
        (BusyError("x"), RetryDecision.WHEN_FREE),
        (MemberError("x", RetryDecision.NO), RetryDecision.NO),
        (MemberError("x", RetryDecision.AGAIN), RetryDecision.AGAIN),
    ],
)
def test_only_what_is_no_users_fault_is_tried_again(error, verdict):
    assert decide_retry(error) == verdict


def test_what_is_tried_again_is_tried_so_often_and_waiting_for_others_does_not_count(monkeypatch):
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.0)
    log = Log()
    lost = WorkerError("lost")
    tasks = [
        log.task("mended", 1, failures=[lost, BusyError("held"), BusyError("held"), BusyError("held"), lost]),
        log.task("broken", 1, failures=[lost] * 9),
        log.task("wrong", 1, failures=[SettingError("no")]),
        log.task("after", 1, after=["mended", "broken"]),
    ]
    run_tasks(tasks, LocalDevicePool(1), log)
    assert log.order.count("mended") == 6
    assert log.order.count("broken") == MAX_ATTEMPTS
    assert log.order.count("wrong") == 1
    assert (log.result["mended"], log.result["broken"]) == (None, lost)
    assert str(log.result["after"]) == "not started, because broken failed"
    assert [verdict for name, verdict in log.again if name == "mended"].count(RetryDecision.WHEN_FREE) == 3


def test_what_failed_comes_back_before_what_is_less_urgent(monkeypatch):
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.2)
    log = Log()
    tasks = [log.task("struck", 1, priority=1, failures=[WorkerError("lost")]), log.task("less", 1)]
    run_tasks(tasks, LocalDevicePool(1), log)
    assert log.order == ["struck", "struck", "less"]


def test_what_our_own_tasks_hold_is_never_said_to_be_others(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.01)

    class Told(Log):
        sure, most = 0, 0

        def poll(self, now):
            if self.result:
                return  # it has ended, and the devices are counted a moment longer
            self.sure, self.most = max(self.sure, now.others_min), max(self.most, now.others)
            if self.most:
                release.set()

    release, log = threading.Event(), Told()
    run_tasks([Task("a", 2, lambda _: release.wait(20)), log.task("b", 1)], Shared(2, [0, 0, *[2] * 40]), log)
    assert log.sure == 0  # it holds both and was not seen at work yet
    assert log.most == 2
    assert log.result == {"a": None, "b": None}


class Shared:
    """A cluster whose devices others take and give back, look by look."""

    def __init__(self, total, held):
        self.total, self.held = total, list(held)

    def usage(self):
        return DeviceUsage(self.total, self.held.pop(0) if self.held else 0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.lists(st.integers(0, 6), max_size=4))
def test_what_others_hold_is_left_to_them_and_all_is_done_in_the_end(needs, held):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "POLL_S", 0.005)
        log = Log()
        run_tasks([log.task(str(at), need) for at, need in enumerate(needs)], Shared(4, held), log)
    assert sorted(log.result.items()) == [(str(at), None) for at in range(len(needs))]
    assert log.most <= 4


def test_a_wait_for_what_others_hold_has_an_end_and_says_the_numbers(monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.005)
    monkeypatch.setattr(scheduler, "MAX_WAIT_S", 0.05)
    log = Log()
    run_tasks([log.task("large", 4), log.task("small", 1)], Shared(4, [3] * 1000), log)
    assert log.result["small"] is None  # the one that fits is not kept waiting
    with pytest.raises(PlacementError, match="needs 4 of the cluster's 4 devices, and others have used 3"):
        raise log.result["large"]


TASKS = st.lists(st.tuples(st.integers(1, 8), st.integers(-1, 1)), min_size=1, max_size=12)


@given(TASKS, st.integers(0, 8), st.integers(0, 8), st.dictionaries(st.sampled_from("0123456789"), st.integers(0, 9)))
def test_what_is_chosen_fits_and_passes_over_only_what_does_not(sizes, free, ours, passed):
    due = in_order([Task(str(at), need, print, (), priority) for at, (need, priority) in enumerate(sizes)])
    assert all((a.priority, a.need) >= (b.priority, b.need) for a, b in pairwise(due))
    chosen = choose(due, free, free + ours, passed)
    before = due if chosen is None else due[: due.index(chosen)]
    waited_long = [one for one in before if one.need <= free + ours and passed.get(one.name, 0) >= MAX_PASSED_OVER]
    if chosen is None:
        assert waited_long or not any(one.need <= free for one in due)
    else:
        assert chosen.need <= free
        assert not waited_long
        assert not any(one.need <= free for one in before)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9)), min_size=1, max_size=40), st.data())
def test_nothing_is_passed_over_more_often_than_it_may_be_however_tasks_come(arrivals, data):
    """Played in steps: tasks come one by one, each takes its time; others hold nothing."""
    passed, due, running, chosen = {}, [], [], []
    coming = [Task(str(at), need, print) for at, (need, _) in enumerate(arrivals)]
    lasts = {str(at): length for at, (_, length) in enumerate(arrivals)}
    for _ in range(500):
        if coming and (data.draw(st.booleans()) or not (due or running)):
            due.append(coming.pop(0))
        free = 8 - sum(task.need for task, _ in running)
        assert free >= 0
        order = in_order(due)
        task = choose(order, free, 8, passed)
        if task is not None:
            for one in order[: order.index(task)]:
                passed[one.name] = passed.get(one.name, 0) + 1
            due.remove(task)
            running.append((task, lasts[task.name]))
            chosen.append(task.name)
            continue
        running = [(one, left - 1) for one, left in running if left > 1]
        if not (coming or due or running):
            break
    assert sorted(chosen) == sorted(lasts)
    assert max(passed.values(), default=0) <= MAX_PASSED_OVER


def test_devices_are_not_kept_for_what_would_not_fit_if_our_own_were_done():
    large, small = waits(6, 2)
    assert choose([large, small], 2, 8, {"0": MAX_PASSED_OVER}) is None
    assert choose([large, small], 2, 5, {"0": MAX_PASSED_OVER}) is small
