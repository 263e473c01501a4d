"""What watches a run fails: wandb cannot be reached or is killed, folders vanish. The training does not notice."""

import json
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from launch.runs.store import RunFolder
from suite.training.metrics import read_steps
from tests.launch.command_line import SMALL, environment, only_run
from tests.launch.tracking.wandb_parts import read

STEPS = 60
SETTINGS = f"{SMALL} pipeline.stages=2 train.steps={STEPS}"


def start(folder, mode, **variables):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "launch.cli", "experiment", "t24_1_3b_wide", "--scale", "laptop", "--launcher",
               "local", "--set", f"{SETTINGS} tracking.wandb={mode}"]  # fmt: skip
    return subprocess.Popen(
        command, cwd=folder, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process):
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def metrics(folder):
    lines = read_steps(only_run(folder) / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["train/loss"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ended(start(folder, "disabled"))
    return metrics(folder)


def test_a_wandb_that_cannot_be_reached_changes_no_loss(tmp_path, undisturbed):
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "0"}
    said = ended(start(tmp_path, "online", **nowhere))
    assert "wandb failed" in said
    assert "training continues, the metrics are in metrics.jsonl" in said.replace("\n", " ")
    assert metrics(tmp_path) == undisturbed
    assert json.loads((only_run(tmp_path) / "record.json").read_text())["wandb_run"] is None


def test_folders_that_vanish_and_a_killed_wandb_change_no_loss(tmp_path, undisturbed):
    process = start(tmp_path, "offline")
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("runs/*/*/trace/*.jsonl"))) < 2:  # the last files that the stages open
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    run = RunFolder(only_run(tmp_path))
    services = [one for one in psutil.Process(process.pid).children(recursive=True) if "wandb" in one.name()]
    assert services
    for one in services:
        one.kill()
    for folder in (run.path / "logs", run.path / "wandb", run.trace_folder):
        assert folder.is_dir()
        shutil.rmtree(folder)
    steps = len(read_steps(run.metrics))
    assert steps < STEPS, "the folders were removed too late to disturb anything"
    ended(process)
    assert metrics(tmp_path) == undisturbed
    attempts = [json.loads(line) for line in run.attempts.read_text().splitlines()]
    assert [line["outcome"] for line in attempts if "outcome" in line] == ["done"]


def test_a_run_that_died_before_its_first_checkpoint_goes_on_in_the_same_wandb_run(trials, monkeypatch):
    fault = {"fault": "kill", "stage": 2, "step": 2, "action": "F1"}
    trial = trials.train(monkeypatch, "tracking.wandb=offline train.steps=4 train.checkpoint_every=4", [fault])
    assert trial.error is None, trial.said
    assert [line["start"] for line in trial.ends] == [0, 0]
    died, store = sorted(trial.run.path.glob("wandb/offline-run-*"))  # of the first what was not yet on disk is lost
    done = read(store)
    assert died.name.rpartition("-")[2] == done.run["run_id"]
    assert [item["step"] for item in done.history if "train/loss" in item] == [1, 2, 3, 4]
    for stage in range(3):
        assert sum(f"pipeline/stage.0.{stage}/resident_bytes" in item for item in done.history) == 1
    assert json.loads(trial.run.record.read_text())["wandb_run"] == done.run["run_id"]
