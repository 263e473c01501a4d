"""``launch.train_loop``: the processes of a TorchTrainer train the bits of LAUNCHER=local, also after one is killed."""

import json
import sys

import psutil

from launch.runs.store import RunFolder
from launch.supervision.attempt_log import read_attempt_lines
from launch.worker.heartbeat import read_heartbeats
from tests.faults.injection import VARIABLE, hook
from tests.launch.backends.test_env_ranks import OWN, trained
from tests.launch.command_line import gpipe_here
from tests.slow.running import Running

TRAINER = """
import json, sys
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from launch import train_loop

folder = sys.argv[1]
ray.init("local", num_cpus=2)  # not the cluster of another test
result = TorchTrainer(
    train_loop,
    train_loop_config={"name": f"{folder}/own.py:small", "settings": "train.threads=1"},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="own", storage_path=folder, failure_config=FailureConfig(max_failures=1)),
).fit()
print("result", json.dumps({"path": result.checkpoint.path} | result.metrics))
"""


def process_of_trainer(run, stage):
    """Returns the process of the trainer that has started a stage, when the stage has begun step 4."""
    for heartbeat in read_heartbeats(run.heartbeats, 1):
        if (heartbeat.stage, heartbeat.step) == (stage, 3):
            return psutil.Process(heartbeat.pid).parent().parent()
    return None


def test_a_killed_process_of_a_trainer_is_started_again_and_costs_no_bit(tmp_path, ended):
    (tmp_path / "own.py").write_text(OWN)
    gpipe_here(tmp_path, "experiment", "own.py:small", "--launcher", "local", "--set", "train.threads=1")
    _, expected = trained(tmp_path)
    pause = {VARIABLE: hook([{"fault": "sleep", "stage": 1, "step": 3, "action": "F0", "seconds": 6}])}
    trainer = ended(Running(tmp_path, [sys.executable, "-c", TRAINER, str(tmp_path)], **pause))
    (found,) = trainer.until(lambda: list((tmp_path / "own").glob("runs/small/*/heartbeats.json")))
    run = RunFolder(found.parent)
    killed = trainer.until(lambda: process_of_trainer(run, 1))
    assert "Train" in killed.name()
    killed.kill()
    trainer.wait()
    assert trained(tmp_path / "own") == (run, expected)
    attempts = read_attempt_lines(run.attempts).values()
    assert [(attempt.get("outcome"), attempt.get("start")) for attempt in attempts] == [(None, 0), ("done", 2)]
    (line,) = [line for line in trainer.printed.splitlines() if line.startswith("result ")]
    result = json.loads(line.removeprefix("result "))
    assert (result["steps"], result["run"]) == (6, str(run.path))
    assert result["path"] == str(run.checkpoints / "00000006")
