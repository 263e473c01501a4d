"""The state of a run, from files as the supervisor and the workers write them."""

import fcntl
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.registry import find
from launch.runs.store import RunFolder, is_locked, run_lock
from launch.supervision.attempt_log import AttemptLog
from launch.supervision.failure import Cause
from launch.watching.run_state import read_state
from launch.worker.heartbeat import HeartbeatWriter, write_heartbeats
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus

NOW = SimpleNamespace(first_step=0, last_step=4, verdict_time=None)
"""What an attempt's watchdog knows at its end."""

DEATH = Cause("death", "stage 1 on h: killed by SIGKILL, last seen at B1", "killed by SIGKILL", 0, 1, 3, "B1")
USER_ERROR = Cause("user", "4 steps in a row had non-finite numbers\nmore")


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def attempts(run):
    return AttemptLog(run.attempts)


def begin(attempts):
    return attempts.begin(find("t12_400m"))


def test_a_run_trains_while_its_lock_is_held(run, attempts):
    with run_lock(run.path):
        assert read_state(run).name == "training"  # its workers start
        begin(attempts)
        assert read_state(run).name == "training"
    assert read_state(run).name == "interrupted"


@pytest.mark.parametrize(
    ("outcome", "cause", "while_locked", "afterwards", "why"),
    [
        ("failed", DEATH, "training", "failed", "replica 0, stage 1 killed by SIGKILL at step 4"),
        ("failed", USER_ERROR, "training", "failed", "4 steps in a row had non-finite numbers"),
        ("done", None, "finished", "finished", ""),  # whoever holds the lock scores it
        ("interrupted", None, "interrupted", "interrupted", ""),
    ],
)
def test_between_two_attempts_a_run_trains_unless_it_is_over_and_not_resumed(
    run, attempts, outcome, cause, while_locked, afterwards, why
):
    attempts.end(begin(attempts), NOW, outcome, cause)
    with run_lock(run.path):
        assert read_state(run).name == while_locked
        assert read_state(run, holds_lock=True).name == afterwards  # the process that ends a run knows
        run.experiment.with_suffix(".draft").write_text("")
        assert read_state(run).name == "training"
    assert (read_state(run).name, read_state(run).cause) == (afterwards, why)


def test_workers_that_send_heartbeats_train_whoever_holds_the_lock(run, attempts):
    writer = HeartbeatWriter(run.path, RankCoord(0, 1, 1), begin(attempts), WorkerStatus())
    write_heartbeats(run.heartbeats, [writer.current()])
    assert read_state(run).name == "training"  # on another machine, say
    write_heartbeats(run.heartbeats, [replace(writer.current(), attempt=7)])
    assert read_state(run).name == "interrupted"
    write_heartbeats(run.heartbeats, [replace(writer.current(), action="finished")])
    assert read_state(run).name == "interrupted"  # the worker has ended, and nobody noted it


def test_looking_at_a_lock_does_not_keep_a_run_from_taking_it(run):
    (run.path / "lock").touch()
    with (run.path / "lock").open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)  # as is_locked takes it
        threading.Timer(0.05, fcntl.flock, (looked_at, fcntl.LOCK_UN)).start()
        with run_lock(run.path):
            assert is_locked(run.path)
