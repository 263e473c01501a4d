"""Which failures lead to another attempt."""

import shutil
from dataclasses import replace

import pytest

from experiments.base.cluster import Cluster
from experiments.planning.fewer_devices import shrunk_to
from experiments.registry import find
from launch.supervision.attempts import Attempts
from launch.supervision.failure import Cause, reason_to_stop
from launch.supervision.watchdog import Watchdog
from launch.worker.attempt import Attempt
from launch.worker.run_plan import RunPlan
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.jsonl import read_lines

KILLED = Cause("death", "killed", "SIGKILL", 0, 1, 17, "B3")
BUG = Cause("program", "a bug", "ZeroDivisionError", 0, 1, 17, "F2")
STALL = Cause("stall", "lost the connection", "NeighbourLostError")
NO_START = Cause("start", "no room", "WorkerError")
LOST = Cause("node", "its node is lost", "gone", 0, 1, 17, "B3")


@pytest.mark.parametrize(
    ("causes", "new", "restarts", "reason"),
    [
        ([KILLED], 1, 10, None),
        ([STALL, STALL], 2, 10, None),  # where it was is not known
        ([replace(STALL, stage=1, action="B3")] * 2, 2, 10, "the same failure"),
        ([NO_START, NO_START], 2, 10, "the same failure"),
        ([NO_START, replace(NO_START, message="the head does not answer")], 2, 10, None),
        ([BUG], 1, 10, None),  # it may be a flaky device
        ([BUG, replace(BUG, action="F3")], 2, 10, "the same failure"),  # of an exception the kind of action counts
        ([BUG, BUG], 1, 10, "the same failure"),  # the checkpoint before it does not make it another one
        ([BUG, replace(BUG, error_type="KeyError")], 2, 10, None),
        ([BUG, replace(BUG, step=18)], 2, 10, None),
        ([KILLED, replace(KILLED, action="B2")], 2, 10, None),
        ([KILLED, KILLED], 2, 10, "the same failure"),
        ([KILLED, BUG, KILLED], 3, 10, None),
        ([KILLED, BUG, KILLED], 3, 2, "3 failures without a new checkpoint"),
        ([KILLED, BUG, KILLED], 1, 2, None),
        ([KILLED], 1, 0, "1 failures"),
        ([LOST, LOST, LOST], 3, 10, None),
        ([LOST, KILLED, LOST], 3, 1, "2 lost machines"),
        ([LOST, KILLED], 2, 1, None),  # counted apart
        ([Cause("user", "no such setting")], 1, 10, "another attempt would not fix it"),
    ],
)
def test_reasons_to_stop(causes, new, restarts, reason):
    found = reason_to_stop(causes, new, restarts)
    assert found is None if reason is None else found is not None and reason in found


def test_attempts_are_numbered_across_resumes(tmp_path):
    experiment = find("t24_1_3b_wide").at_laptop_scale(Cluster(2, 2**33, "cpu"))
    path = tmp_path / "attempts.jsonl"
    attempts = Attempts(path)
    assert attempts.begin(experiment) == 1
    plan = RunPlan((1,), ScheduleConfig())
    attempts.end(1, Watchdog(Attempt(tmp_path, tmp_path, 1), experiment, plan), "failed", KILLED)
    assert attempts.begin(experiment) == 2  # and its driver was killed
    path.write_text(path.read_text() + '{"attempt": 3, "beg')  # while it wrote this
    later = Attempts(path)
    assert later.begin(experiment) == 3
    later.recovered(3, 1.5)
    assert [line["attempt"] for line in read_lines(path)] == [1, 1, 2, 3, 3]
    shutil.rmtree(tmp_path)
    assert later.begin(experiment) == 4  # nothing can be written: the run is supervised all the same


def test_a_run_shrinks_with_its_mini_batch_and_micro_batches():
    asked = (
        find("t24_1_3b_wide")
        .at_laptop_scale(Cluster(2, 2**33, "cpu"))
        .with_settings("pipeline.stages=3 pipeline.replicas=4 pipeline.micro_batches=2")
    )

    def sizes(devices):
        return [(e.pipeline.stages, e.pipeline.replicas, e.pipeline.micro_batches) for e in shrunk_to(asked, devices)]

    assert sizes(12)[0] == (3, 4, 2)
    assert sizes(11) == [(3, 2, 4), (3, 1, 8), (2, 1, 8), (1, 1, 8)]  # eight cannot be dealt to three
    assert sizes(2) == [(2, 1, 8), (1, 1, 8)]
    assert sizes(0) == []
