"""Which worker stalls an attempt, decided from heartbeats alone."""

import re
import threading
import time
from dataclasses import replace

import pytest

from experiments.registry import find
from launch.supervision.stall_report import stall_report
from launch.supervision.watchdog import END_S, FIRST_HEARTBEAT_S, StallDetector, Watchdog
from launch.worker import heartbeat as heartbeat_module
from launch.worker.attempt import Attempt
from launch.worker.heartbeat import Heartbeat, HeartbeatWriter, path_of, read_heartbeat
from launch.worker.run_plan import RunPlan
from suite.errors import WorkerError
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import FIRST_ACTION_TIMEOUT_S, DeviceMark, WorkerStatus
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig

COORDS = [RankCoord(rank, 3, 1) for rank in range(3)]
FINE = Heartbeat(0, 0, 1, 7, "here", "", 1, 1, "F2", 17, 0, 17, None, "", 0.1, 8.0, 8.0)


def heartbeat(stage, number, **changes):
    return replace(FINE, stage=stage, number=number, **changes)


def seen(heartbeat_at, seconds=400, every=0.5):
    """Returns the verdict on the heartbeats ``heartbeat_at(second, stage)``, and its time."""
    detector = StallDetector(COORDS)
    for look in range(int(seconds / every)):
        now = look * every
        heartbeats = {stage: said for stage in range(3) if (said := heartbeat_at(now, stage)) is not None}
        verdict = detector.update(heartbeats, every)
        if verdict is not None:
            return verdict, now
    return None, seconds


def beating(now, stage, **changes):
    """A worker that sends a heartbeat each second."""
    return heartbeat(stage, int(now) + 1, **changes)


def stage_2_is_silent(now, stage):
    return beating(min(now, 20) if stage == 2 else now, stage)


def all_are_silent(now, stage):
    return beating(min(now, 20), stage)


def stage_1_computes(now, stage):
    waiting = "" if stage == 1 else "the activations from stage 1"
    return beating(now, stage, elapsed_s=now, waiting=waiting, layer=12 if stage == 1 else None)


def stage_1_saves(now, stage):
    if stage == 1:
        return beating(now, 1, action="save", elapsed_s=now, current_timeout_s=300.0, waiting="the checkpoint")
    return beating(now, stage, elapsed_s=now, waiting="the activations from stage 1")


def all_wait(now, stage):
    return beating(now, stage, elapsed_s=now, waiting="a message")


def stage_2_waits_for_the_end(now, stage):
    if stage != 2:
        return heartbeat(stage, 1, action="finished")
    return beating(now, 2, action="end", elapsed_s=now, current_timeout_s=300.0, waiting="the end of the run")


def all_have_finished(now, stage):
    return heartbeat(stage, 1, action="finished")


def stage_0_never_starts(now, stage):
    return None if stage == 0 else beating(now, stage)


@pytest.mark.parametrize(
    ("heartbeat_at", "stage", "earliest", "latest", "message"),
    [
        (stage_2_is_silent, 2, 28, 30, "replica 0, stage 2 on here has sent no heartbeat for .* at F2 of step 18"),
        (all_are_silent, None, 43, 46, ""),  # a longer timeout, which has an end as well
        (stage_1_computes, 1, 8.5, 9.5, "at F2 in layer 12 of step 18"),
        (stage_1_saves, None, 299.5, 400, "stage 1|all workers wait"),
        (all_wait, None, 0, 9.5, "all workers wait for one another"),
        (stage_2_waits_for_the_end, 2, 300, 301.5, ""),
        (all_have_finished, None, END_S, END_S + 1.5, "all workers have finished"),
        (stage_0_never_starts, 0, FIRST_HEARTBEAT_S, FIRST_HEARTBEAT_S + 1.5,
         "stage 0 sent no heartbeat in 300 s since the last other worker came"),
    ],
)  # fmt: skip
def test_a_stall_is_noticed_in_time_and_its_cause_is_named(heartbeat_at, stage, earliest, latest, message):
    verdict, when = seen(heartbeat_at)
    assert stage in (None, verdict.coord.stage)
    assert re.search(message, verdict.message)
    assert earliest <= when <= latest


def some_have_ended(now, stage):
    return beating(now, 2) if stage == 2 else heartbeat(stage, 1, action=("finished", "failed")[stage])


def one_after_the_other(now, stage):
    """Each comes within 300 s after the one before, the last one 870 s after the start."""
    return beating(now, stage) if now >= 290 * (stage + 1) else None


@pytest.mark.parametrize("heartbeat_at", [beating, some_have_ended, one_after_the_other])
def test_workers_that_make_progress_get_no_verdict(heartbeat_at):
    assert seen(heartbeat_at, 1000)[0] is None


def test_a_wait_does_not_count_as_work_when_it_is_over():
    status = WorkerStatus()
    status.begin(Action("B", 2), 17)
    status.began_s -= 20
    assert status.elapsed_s > 19
    with status.waiting_for("the gradients", 30):
        with status.allow(40):
            assert (status.waiting, status.current_timeout_s) == ("", FIRST_ACTION_TIMEOUT_S)
        assert status.waiting == "the gradients"
    assert status.elapsed_s < 1
    status.began_s -= 20
    status.message_timeout.ended_s = time.monotonic()  # that of a message
    assert status.elapsed_s < 1
    with pytest.raises(KeyError), status.waiting_for("the gradients"):
        raise KeyError
    assert status.waiting == "the gradients"  # others left it waiting: it is not the cause


def test_an_action_is_in_the_file_before_the_next_heartbeat_and_a_damaged_file_is_ignored(tmp_path):
    status = WorkerStatus()
    with HeartbeatWriter(tmp_path, COORDS[1], 3, status):
        status.begin(Action("B", 2), 17)
        status.begin(Action("B", 1), 17)
        last = read_heartbeat(tmp_path, 0, 1, 3)
        assert (last.action, last.step) == ("B1", 17)
        assert read_heartbeat(tmp_path, 0, 1, 2) is None  # another attempt's
        path = path_of(tmp_path, 0, 1)
        whole = path.read_bytes()
        damaged = (whole + b"x", whole[:100], b"\xff" + whole, whole.replace(b'"elapsed_s":', b'"elapsed_s":"x","x":'))
        for content in damaged:
            path.write_bytes(content)
            assert read_heartbeat(tmp_path, 0, 1, 3) is None
    assert read_heartbeat(tmp_path, 0, 1, 3).action == "finished"


class Event:
    """A stand-in for an event on a device's stream."""

    def __init__(self, happened=False, error=None):
        self.happened, self.error = happened, error

    def query(self):
        if self.error is not None:
            raise self.error
        return self.happened


def ahead(stage, *marks):
    """Returns the status of a host that has enqueued a whole step; ``marks`` are (action, what the device waits for,
    empty if it computes, whether the device has passed the mark)."""
    status = WorkerStatus(action_timeout_s=8.0)
    status.begin("close" if stage == 2 else "update", 17)
    for action, waiting, happened in marks:
        status.device_marks.append(DeviceMark(Action(*action), waiting, Event(happened)))
    return status


def test_the_stage_whose_device_hangs_is_named_though_its_host_has_run_ahead(tmp_path):
    """Stage 1's device hangs in F1. The others wait for its messages on their devices, the last stage's host too, which
    reads the loss."""
    computes, message = "", "a message"
    statuses = [
        ahead(0, (("F", 1), computes, True), (("B", 1), message, False), (("B", 1), computes, False)),
        ahead(1, (("F", 0), computes, True), (("F", 1), message, True), (("F", 1), computes, False)),
        ahead(2, (("F", 0), computes, True), (("F", 1), message, False), (("F", 1), computes, False)),
    ]
    writers = [HeartbeatWriter(tmp_path, coord, 1, status) for coord, status in zip(COORDS, statuses, strict=True)]
    with statuses[0].waiting_for("the other workers' gradients and norms"):
        said = [writer.current() for writer in writers]
    assert [(one.action, one.waiting) for one in said] == [("B1", message), ("F1", computes), ("F1", message)]

    def heartbeat_at(now, stage):
        return replace(said[stage], number=int(now) + 1, elapsed_s=now)

    verdict, when = seen(heartbeat_at, 100)
    assert verdict.coord.stage == 1
    assert "has been at F1 of step 18" in verdict.message
    assert 8 < when < 10


def test_a_heartbeat_says_where_the_host_is_once_the_device_has_come_so_far(tmp_path):
    status = ahead(2, (("F", 0), "a message", True), (("F", 0), "", False))
    writer = HeartbeatWriter(tmp_path, COORDS[2], 1, status)
    with status.waiting_for("its device to finish the step"):
        assert (writer.current().action, writer.current().waiting) == ("F0", "")
        status.device_marks[0].event.happened = True
        assert (writer.current().action, writer.current().waiting) == ("close", "its device to finish the step")
    assert not status.device_marks


def test_a_device_is_at_an_action_since_the_one_before_or_since_its_host_enqueued_it():
    status = ahead(1, (("F", 0), "", True))
    assert status.on_device() is None
    status.device_marks.append(DeviceMark(Action("F", 1), "", Event(), time.monotonic() - 20))
    status._passed_s -= 5
    mark, elapsed_s = status.on_device()
    assert mark.action == Action("F", 1)
    assert 5 <= elapsed_s < 15
    status._passed_s -= 50
    assert 20 <= status.on_device()[1] < 30


def test_a_device_that_has_failed_leaves_the_heartbeat_to_its_host(tmp_path):
    status = ahead(1, (("F", 0), "", False))
    status.device_marks[0].event.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with HeartbeatWriter(tmp_path, COORDS[1], 1, status):
        assert read_heartbeat(tmp_path, 0, 1, 1).action == "update"
        status.device_marks.append(DeviceMark(Action("F", 1), "", Event()))
    assert read_heartbeat(tmp_path, 0, 1, 1).action == "finished"


def test_a_heartbeat_that_hangs_in_a_driver_does_not_hold_up_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "PERIOD_S", 0.01)
    status, hanging, released = ahead(1, (("F", 0), "", False)), threading.Event(), threading.Event()
    came_back = []

    def query():
        if threading.current_thread() is not threading.main_thread():
            hanging.set()
            came_back.append(released.wait(20))
        return False

    status.device_marks[0].event.query = query
    with HeartbeatWriter(tmp_path, COORDS[1], 1, status) as writer:
        assert hanging.wait(60)
        status.begin(Action("B", 2), 17)
        assert not came_back, "it waited for the thread that hangs"
        writer._thread.end = lambda: False  # it would wait for seconds
    released.set()


@pytest.mark.parametrize(("what", "row"), [("B3", "F3 [B3] R2"), ("update", "[update] save"), ("end", "[end]")])
def test_the_stall_report_shows_where_each_stage_is(what, row):
    heartbeats = {0: heartbeat(0, 1, action=what, waiting="the gradients from stage 1"), 1: heartbeat(1, 1)}
    text = stall_report(ScheduleConfig(), COORDS, 4, heartbeats, {1: "the root cause: no heartbeat for 8 s"})
    first, second, third = text.splitlines()
    assert first.startswith("  stage 0  ")
    assert row in first
    assert "step 18, waits for the gradients from stage 1" in first
    assert "[F2]" in second
    assert second.endswith("the root cause: no heartbeat for 8 s")
    assert third.endswith("no heartbeat yet")


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """The watchdog of two workers, which looks often."""
    monkeypatch.setattr("launch.supervision.watchdog.PERIOD_S", 0.01)
    experiment = find("t24_1_3b_wide").with_settings("pipeline.stages=2 pipeline.replicas=1")
    return Watchdog(Attempt(tmp_path, tmp_path, 2), experiment, RunPlan((1, 1), ScheduleConfig()))


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_there_is_no_verdict_while_workers_are_being_placed(watch, monkeypatch):
    monkeypatch.setattr("launch.supervision.watchdog.FIRST_HEARTBEAT_S", 0.05)
    watch.paused = True
    with watch:
        time.sleep(0.4)
        assert watch.verdict is None
        watch.paused = False
        wait_until(lambda: watch.verdict is not None)
    assert "sent no heartbeat" in watch.verdict.message


def test_the_watchdog_survives_an_exception_and_the_death_of_its_thread_is_reported(watch, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.error_log.CACHE", tmp_path / "cache")
    failures = [ValueError("no number"), SystemExit()]

    def fail():
        raise failures.pop(0)

    watch.read_heartbeats = fail
    with watch:
        wait_until(lambda: not failures)
        watch.read_heartbeats = lambda: None
        with pytest.raises(WorkerError, match="the watchdog's thread has died"):
            wait_until(lambda: watch.should_stop)
    said = (tmp_path / "messages.log").read_text()
    assert "heartbeats failed (ValueError: no number); the run continues" in said
    assert "ValueError: no number" in (tmp_path / "cache/errors.log").read_text()
