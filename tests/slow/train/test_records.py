"""What watches a run fails: wandb cannot be reached or is killed, folders vanish. The training does not notice."""

import json
import shutil

import psutil
import pytest

from launch.runs.store import RunFolder
from suite.training.metrics import read_steps
from tests.launch.command_line import SMALL, only_run
from tests.launch.tracking.wandb_parts import read
from tests.slow.running import EXPERIMENT, Running

STEPS = 60
SETTINGS = f"{SMALL} pipeline.stages=2 train.steps={STEPS}"


def start(folder, mode, **variables):
    settings = f"{SETTINGS} tracking.wandb={mode}"
    return Running(folder, [*EXPERIMENT, "--launcher", "local", "--set", settings], **variables)


def metrics(folder):
    lines = read_steps(only_run(folder) / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["train/loss"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    start(folder, "disabled").wait()
    return metrics(folder)


def test_a_wandb_that_cannot_be_reached_changes_no_loss(tmp_path, ended, undisturbed):
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "0"}
    command = ended(start(tmp_path, "online", **nowhere))
    command.wait()
    assert "wandb failed" in command.printed
    assert "training continues, the metrics are in metrics.jsonl" in command.printed.replace("\n", " ")
    assert metrics(tmp_path) == undisturbed
    assert json.loads((only_run(tmp_path) / "record.json").read_text())["wandb_run"] is None


def test_folders_that_vanish_and_a_killed_wandb_change_no_loss(tmp_path, ended, undisturbed):
    command = ended(start(tmp_path, "offline"))
    # the last files that the stages open
    command.until(lambda: len(list(tmp_path.glob("runs/*/*/trace/*.jsonl"))) == 2)
    run = RunFolder(only_run(tmp_path))
    services = [one for one in psutil.Process(command.process.pid).children(recursive=True) if "wandb" in one.name()]
    assert services
    for one in services:
        one.kill()
    for folder in (run.path / "logs", run.path / "wandb", run.trace_folder):
        assert folder.is_dir()
        shutil.rmtree(folder)
    steps = len(read_steps(run.metrics))
    assert steps < STEPS, "the folders were removed too late to disturb anything"
    command.wait()
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
