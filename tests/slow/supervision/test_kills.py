"""SIGKILL of every stage at every action of a step: the run goes on by itself, to the undisturbed run's last bit."""

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
    assert first["ended"] - struck_at(trial, stage) + trial.recovered[0] < 60


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
    assert first["ended"] - struck[3] + trial.recovered[0] < 60
