"""Which failures lead to another attempt."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning.choose import smaller_runs, try_plan
from experiments.planning.problem import estimated_costs
from experiments.registry import find
from launch.runs.store import RunFolder
from launch.supervision.attempt_log import AttemptLog
from launch.supervision.failure import Cause, find_cause, on_same_node, reason_to_stop
from launch.supervision.watchdog import Watchdog
from launch.train.session import CurrentRun
from launch.worker.attempt import Attempt
from launch.worker.run_plan import RunPlan
from suite.errors import (
    FailureLocation,
    ForkserverError,
    ProgramError,
    SettingError,
    StallError,
    WorkerDiedError,
    WorkerError,
)
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.jsonl import read_lines

THIS = Cluster(2, 2**33, "cpu")
KILLED = Cause("death", "killed", "SIGKILL", 0, 1, 17, "B3")
BUG = Cause("program", "a bug", "ZeroDivisionError", 0, 1, 17, "F2")
STALL = Cause("stall", "lost the connection", "PeerLostError")
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


COORDS = [RankCoord(rank, 2, 2) for rank in range(4)]
SEEN = SimpleNamespace(step=17, action="B3", layer=5, host="host", node="node", at="step 18, B3")
"""The last heartbeat of worker 3, which is stage 1 of replica 1."""
HERE, THERE = replace(BUG, host="a", node="1"), replace(BUG, host="a", node="2")


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([HERE], False),
        ([HERE, replace(HERE, step=18, error_type="KeyError")], True),
        ([HERE, THERE], False),
        ([replace(KILLED, host="a", node="1"), HERE], False),
    ],
)
def test_only_two_exceptions_in_a_row_on_a_node_make_it_suspect(causes, expected):
    assert on_same_node(causes) == expected


SILENT = Cause(
    "stall", "it is silent; its log is LOG\nthe stages", "", 1, 1, 17, "B3", 5, "host", "node", "LOG"
)  # fmt: skip
A_BUG = ProgramError("a bug", "KeyError", FailureLocation(1, 1, 16, "F2", 4, "its host", "its log"))


@pytest.mark.parametrize(
    ("error", "has_verdict", "expected"),
    [
        (A_BUG, False, Cause("program", "a bug", "KeyError", 1, 1, 16, "F2", 4, "its host", "node", "its log")),
        (A_BUG, True, Cause("program", "a bug", "KeyError", 1, 1, 16, "F2", 4, "its host", "node", "its log")),
        (
            WorkerDiedError(3, "killed by SIGKILL"), False,
            Cause(
                "death", "replica 1, stage 1 on host: killed by SIGKILL, last seen at step 18, B3; its log is LOG",
                "killed by SIGKILL", 1, 1, 17, "B3", 5, "host", "node", "LOG",
            ),
        ),
        (
            WorkerDiedError(2, "its node is lost", "node"), True,  # the verdict follows from it
            Cause(
                "node", "replica 1, stage 0: its node is lost before its first heartbeat; its log is LOG",
                "its node is lost", 1, 0, log="LOG",
            ),
        ),
        (StallError("waited 300 s"), True, SILENT),
        (WorkerDiedError(0, "killed"), True, SILENT),
        (StallError("waited 300 s"), False, Cause("stall", "waited 300 s\nthe stages", "StallError")),
        (ForkserverError("it died"), False, Cause("death", "it died", "ForkserverError", step=12)),
        (WorkerError("no room"), False, Cause("start", "no room", "WorkerError")),
        (SettingError("no such thing"), False, Cause("user", "no such thing", "SettingError")),
    ],
)  # fmt: skip
def test_the_cause_of_a_failure_and_where_it_was(error, has_verdict, expected):
    verdict = SimpleNamespace(coord=COORDS[3], heartbeat=SEEN, message="it is silent")
    watchdog = SimpleNamespace(
        verdict=verdict if has_verdict else None, coords=COORDS, heartbeats={3: SEEN}, last_step=12,
        stall_report=lambda: "the stages",
    )  # fmt: skip
    run = SimpleNamespace(log=lambda replica, stage: "LOG")
    assert find_cause(error, run, watchdog) == expected


def test_attempts_are_numbered_across_resumes(tmp_path):
    experiment = find("t24_1_3b_wide").at_laptop_scale(THIS)
    path = tmp_path / "attempts.jsonl"
    attempts = AttemptLog(path)
    assert attempts.begin(experiment) == 1
    plan = RunPlan((1,), ScheduleConfig())
    attempts.end(1, Watchdog(Attempt(tmp_path, tmp_path, 1), experiment, plan), "failed", KILLED)
    assert attempts.begin(experiment) == 2  # and its driver was killed
    path.write_text(path.read_text() + '{"attempt": 3, "beg')  # while it wrote this
    later = AttemptLog(path)
    assert later.begin(experiment) == 3
    later.note(attempt=3, start=4, recovered_s=1.5004)
    assert read_lines(path)[-1] == {"attempt": 3, "start": 4, "recovered_s": 1.5}
    assert [line["attempt"] for line in read_lines(path)] == [1, 1, 2, 3, 3]
    shutil.rmtree(tmp_path)
    assert later.begin(experiment) == 4  # nothing can be written: the run is supervised all the same


def planned_at(settings):
    work = find("t24_1_3b_wide").at_laptop_scale(THIS).with_settings(settings)
    return try_plan(work, parse_cluster("12x16GiB", THIS), estimated_costs)


def sizes(planned, devices):
    left = parse_cluster(f"{max(1, devices)}x16GiB", THIS)
    runs = smaller_runs(planned, devices, lambda: left)
    return [(run.pipeline.stages, run.pipeline.replicas, run.pipeline.micro_batches) for run in runs]


def test_a_run_shrinks_to_its_fastest_shape_with_its_mini_batch_and_micro_batches():
    planned = planned_at("pipeline.stages=3 pipeline.replicas=4 pipeline.micro_batches=2")
    assert sizes(planned, 12)[0] == (3, 4, 2)
    shapes = sizes(planned, 11)
    assert set(shapes[:2]) == {(2, 4, 2), (3, 2, 4)}  # eight cannot be dealt to three
    assert shapes[0] == (2, 4, 2)  # two devices more than 3 x 2
    assert set(shapes[2:]) == {(1, 1, 8), (2, 1, 8), (3, 1, 8)}
    assert set(sizes(planned, 2)[:2]) == {(1, 2, 4), (2, 1, 8)}
    assert sizes(planned, 0) == []


def test_a_run_goes_on_with_fewer_devices_and_with_its_own_plan_when_they_are_back(tmp_path):
    whole, few = (parse_cluster(text, THIS) for text in ("4xH100", "3xH100"))
    work = find("t24_1_3b_wide").at_laptop_scale(THIS).with_settings("pipeline.stages=2 pipeline.replicas=2")
    there = [whole]
    session = SimpleNamespace(
        backend=SimpleNamespace(cluster=lambda: there[0]),
        is_brief=True,
        plan=lambda asked: try_plan(asked, there[0], estimated_costs),
    )
    current = CurrentRun(session, RunFolder(tmp_path), session.plan(work), False, None)
    before, requested = current.attempt, current.plan
    assert current.fitted_to(4) == (work, requested, before)
    there[0] = few
    _, plan, attempt = current.fitted_to(3)
    assert (attempt.workers, attempt.on_fewer_devices) == (2, True)
    assert RunPlan.read(attempt.input_files[1]) == plan
    assert current.fitted_to(3)[2] is attempt
    there[0] = whole
    assert current.fitted_to(4) == (work, requested, before)


def test_a_schedule_from_a_file_does_not_shrink(tmp_path):
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    own = f"pipeline.schedule={tmp_path / 'own.csv'} pipeline.micro_batches=2 pipeline.stages=2"
    assert sizes(planned_at(f"{own} pipeline.replicas=2"), 3) == []
