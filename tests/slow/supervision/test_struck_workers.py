"""Workers that are killed at every action of a step, stand still, raise, or answer late: the run goes on by itself, to
the undisturbed run's last bit."""

import os
import re
import signal
import threading
import time
from multiprocessing import forkserver

import psutil
import pytest

from launch.runs.store import RunFolder
from launch.worker.heartbeat import read_heartbeats
from suite.pipeline.schedule.config import ScheduleConfig
from tests.slow.trial import assert_same

SETTINGS = "train.steps=6 train.checkpoint_every=2"
NAMED_S, RECOVERED_S, STOPPED_S = 10.0, 60.0, 5.0
STEP = 3
ACTIONS = [[str(action) for action in row] + ["update", "save"] for row in ScheduleConfig().actions(3, 4)]
CASES = [(stage, action) for stage, row in enumerate(ACTIONS) for action in row]


@pytest.fixture(scope="module")
def undisturbed(trials):
    with pytest.MonkeyPatch.context() as patch:
        return trials.train(patch, SETTINGS)


def struck_at(trial, stage):
    """Returns the time of day at which the fault fell, from the worker's log."""
    return float(re.search(r"fault \w+ at .*, ([\d.]+)$", trial.run.log(0, stage).read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize(("stage", "action"), CASES)
def test_a_kill_costs_no_bit(trials, undisturbed, monkeypatch, stage, action):
    fault = {"fault": "kill", "stage": stage, "step": STEP, "action": action}
    trial = trials.train(monkeypatch, SETTINGS, [fault])
    assert trial.error is None, trial.said
    first, last = trial.ends
    assert (first["kind"], first["stage"], first["step"], first["action"]) == ("death", stage, STEP + 1, action)
    assert last["outcome"] == "done"
    assert [line["start"] for line in trial.ends] == trial.published
    assert last["start"] in ((0, 2, 4) if action == "save" else (0, 2))  # one is written while the next steps are done
    assert_same(trial, undisturbed)
    assert first["ended"] - struck_at(trial, stage) + trial.recovered[0] < RECOVERED_S


def test_a_killed_forkserver_is_named_and_costs_no_bit(trials, undisturbed, monkeypatch):
    """No worker of the first attempt may be left beside those of the second: they would write the same files."""
    struck, left = [], []

    def strike(run):
        while not run.metrics.exists() or len(run.metrics.read_text().splitlines()) < STEP:
            time.sleep(0.01)
        struck.extend(heartbeat.pid for heartbeat in read_heartbeats(run.heartbeats, 1))
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        struck.append(time.time())

    def before_each():
        (run,) = trials.root.glob(f"run-{trials._count}")
        if not struck:
            threading.Thread(target=strike, args=[RunFolder(run)], daemon=True).start()
        else:
            time.sleep(1.0)  # the kernel takes a killed process's memory down
        left.extend(pid for pid in struck[:3] if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie")

    trial = trials.train(monkeypatch, SETTINGS, [{"fault": "sleep", "step": 4, "action": "F0"}], before_each)
    assert trial.error is None, trial.said
    assert not left
    first, last = trial.ends
    assert (first["kind"], first.get("stage"), last["outcome"]) == ("death", None, "done")
    assert re.search(r"forkserver, process \d+\) was killed by SIGKILL, and all workers died with it", first["message"])
    assert_same(trial, undisturbed)
    assert first["ended"] - struck[3] + trial.recovered[0] < RECOVERED_S


STOPPED = [(0, "F0"), (1, "F2"), (2, "B3"), (0, "B0"), (1, "update"), (2, "save"), (0, "save")]
ASLEEP = [(1, "F2", 3), (0, "R1", 1), (2, "B2", None), (1, "update", None)]


@pytest.mark.parametrize(
    ("fault", "stage", "action", "layer"),
    [*(("stop", *place, None) for place in STOPPED), *(("sleep", *place) for place in ASLEEP)],
)
def test_a_worker_that_stands_still_is_named_and_replaced(
    trials, undisturbed, monkeypatch, fault, stage, action, layer
):
    plan = {"fault": fault, "stage": stage, "step": 3, "action": action, "layer": layer}
    trial = trials.train(monkeypatch, SETTINGS, [plan])
    assert trial.error is None, trial.said
    first, _ = trial.ends
    assert (first["kind"], first["stage"], first["step"], first["action"]) == ("stall", stage, 4, action)
    assert first.get("layer") == layer
    assert f"replica 0, stage {stage} on" in first["message"]
    if fault == "stop":
        assert "has sent no heartbeat for" in first["message"]
        rows = [line for line in first["message"].splitlines() if line.startswith("  stage ")]
        assert ["root cause" in row for row in rows] == [k == stage for k in range(3)]
        assert f"[{action}]" in rows[stage]
    assert first["named"] - struck_at(trial, stage) < NAMED_S
    assert first["ended"] - struck_at(trial, stage) + trial.recovered[0] < RECOVERED_S
    assert_same(trial, undisturbed)


@pytest.mark.parametrize(("stage", "action", "layer"), [(0, "F3", 0), (1, "R2", 4), (2, "F1", 5)])
def test_an_exception_in_a_layer_is_told_and_survived_once(trials, undisturbed, monkeypatch, stage, action, layer):
    fault = {"fault": "raise", "stage": stage, "step": 3, "action": action, "layer": layer}
    trial = trials.train(monkeypatch, SETTINGS, [fault])
    assert trial.error is None, trial.said
    first, _ = trial.ends
    for words in (f"replica 0, stage {stage} on", f"micro-batch {action[1:]}", f"in layer {layer} (", "InjectedError"):
        assert words in first["message"]
    assert first["ended"] - struck_at(trial, stage) < STOPPED_S
    assert_same(trial, undisturbed)


def test_late_messages_change_no_bit(trials, undisturbed, monkeypatch):
    trial = trials.train(monkeypatch, SETTINGS, [{"fault": "delay", "attempt": None, "seconds": 0.2}])
    assert trial.error is None, trial.said
    assert len(trial.ends) == 1
    assert_same(trial, undisturbed)


@pytest.mark.parametrize(
    ("shape", "fault", "action", "kind"),
    [
        ("pipeline.replicas=2 pipeline.micro_batches=2 pipeline.schedule=1f1b", "kill", "B1", "death"),
        ("pipeline.replicas=2 pipeline.micro_batches=2 pipeline.schedule=1f1b", "stop", "F1", "stall"),
        ("pipeline.schedule=interleaved pipeline.virtual_stages=2", "stop", "F2.1", "stall"),
        ("pipeline.schedule=zero_bubble", "kill", "W2", "death"),
    ],
)
def test_other_schedules_and_replicas_are_struck_too(trials, monkeypatch, shape, fault, action, kind):
    undisturbed = trials.train(monkeypatch, f"{SETTINGS} pipeline.stages=2 {shape}")
    assert undisturbed.error is None
    replica = 1 if "replicas=2" in shape else 0
    plan = {"fault": fault, "replica": replica, "stage": 1, "step": 3, "action": action}
    trial = trials.train(monkeypatch, f"{SETTINGS} pipeline.stages=2 {shape}", [plan])
    assert trial.error is None, trial.said
    first, _ = trial.ends
    assert (first["kind"], first["replica"], first["stage"], first["action"]) == (kind, replica, 1, action)
    assert_same(trial, undisturbed)
