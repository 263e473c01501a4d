"""Several tasks at once: never more cores than there are, the large ones first, a failure takes only what needs it."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from launch.sweeps.lanes import Task, run_tasks


class Log:
    """Notes what was at work at the same time."""

    def __init__(self):
        self.lock, self.now, self.most, self.order, self.ended = threading.Lock(), 0, 0, [], {}

    def task(self, name, cores, fails=False, after=()):
        def work():
            with self.lock:
                self.now += cores
                self.most = max(self.most, self.now)
                self.order.append(name)
            with self.lock:
                self.now -= cores
            if fails:
                raise ValueError(name)

        return Task(name, cores, work, tuple(after))

    def hear(self, task, error):
        self.ended[task.name] = error


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12), st.integers(1, 4))
def test_every_task_is_done_once_in_the_room_there_is(sizes, room):
    log = Log()
    run_tasks([log.task(str(at), *size) for at, size in enumerate(sizes)], room, log.hear)
    assert sorted(log.order) == sorted(map(str, range(len(sizes))))
    assert log.most <= max(room, *(cores for cores, _ in sizes), 0) if sizes else log.most == 0
    assert {name for name, error in log.ended.items() if error} == {str(at) for at, (_, bad) in enumerate(sizes) if bad}


def test_two_that_fit_are_at_work_at_once_and_a_third_waits_for_room():
    meeting, third = threading.Barrier(2, timeout=20), threading.Event()
    seen = []

    def meet():
        meeting.wait()  # a serial runner never gets here
        seen.append(third.is_set())
        meeting.wait()

    tasks = [Task("a", 2, meet), Task("b", 2, meet), Task("c", 1, third.set)]
    ended = {}
    run_tasks(tasks, 4, lambda task, error: ended.update({task.name: error}))
    assert ended == {"a": None, "b": None, "c": None}
    assert seen == [False, False]


def test_what_needs_most_goes_first_and_what_comes_after_waits():
    log = Log()
    tasks = [
        log.task("small", 1), log.task("large", 2), log.task("score large", 1, after=["large"]),
        log.task("larger", 2),
    ]  # fmt: skip
    run_tasks(tasks, 2, log.hear)
    assert log.order[:2] == ["large", "larger"]
    assert sorted(log.order[2:]) == ["score large", "small"]


def test_a_failure_takes_what_comes_after_it_and_nothing_else():
    log = Log()
    tasks = [
        log.task("a", 1, fails=True), log.task("b", 1, after=["a"]), log.task("c", 1, after=["b"]), log.task("d", 1),
    ]  # fmt: skip
    run_tasks(tasks, 1, log.hear)
    assert sorted(log.order) == ["a", "d"]
    assert str(log.ended["a"]) == "a"
    assert log.ended["d"] is None
    assert str(log.ended["b"]) == "not begun, since a failed"
    assert str(log.ended["c"]) == "not begun, since b failed"


def test_a_task_after_one_that_is_not_in_the_list_may_begin():
    log = Log()
    run_tasks([log.task("score", 1, after=["train"])], 2, log.hear)
    assert log.order == ["score"]
