"""A run continues from an earlier checkpoint: later ones and later metrics go, also when a worker is then killed."""

import json
from dataclasses import replace

import pytest

from launch.backends.processes import LocalLauncher
from launch.supervision.supervisor import Supervisor
from launch.worker.attempt import run_logger
from suite.errors import CheckpointError
from suite.training.jsonl import read_lines
from tests.faults.injection import VARIABLE, hook
from tests.slow.trial import Trial
from tests.suite.training.checkpoint.saves import layer_files

SETTINGS = "train.steps=12 train.checkpoint_every=3 pipeline.stages=2"


def test_a_run_continues_from_a_chosen_step_and_a_restart_does_not_return_to_the_later_ones(trials, monkeypatch):
    trial = trials.train(monkeypatch, SETTINGS)
    assert steps(trial) == [9, 12]
    last = trial.run.checkpoints / "00000012"
    kept = {name: path.read_bytes() for name, path in layer_files(last).items()}
    losses = trial.losses
    experiment = trials.experiment(SETTINGS)
    _, plan, attempt = trials.job_of(trial.run, experiment, resume=True)
    attempt = replace(attempt, checkpoint_step=9)
    kill = {"fault": "kill", "attempt": 2, "stage": 0, "step": 10, "action": "F1"}
    monkeypatch.setenv(VARIABLE, hook([kill]))
    seen = []

    class Looking(LocalLauncher):
        def run(self, attempt, experiment, watchdog):
            seen.append((attempt.checkpoint_step, steps(trial), trial.run.record.exists(), last_step(trial)))
            super().run(attempt, experiment, watchdog)

    Supervisor(experiment, plan, attempt, Looking(), None, run_logger(trial.run.messages)).run()
    assert seen[0] == (9, [9, 12], True, 12)
    assert seen[1] == (None, [9, 12], False, 10)
    assert [line["start"] for line in trial.ends] == [0, 9, 9]  # 12 was abandoned when the second attempt began
    again = Trial(trial.run, None, [])
    assert again.losses == losses
    assert {name: path.read_bytes() for name, path in layer_files(last).items()} == kept
    assert json.loads(trial.run.record.read_text())["steps"] == 12


def steps(trial):
    return sorted(int(path.parent.name) for path in trial.run.checkpoints.glob("*/manifest.json"))


def last_step(trial):
    return read_lines(trial.run.metrics)[-1]["step"]


def test_a_fork_that_cannot_mark_the_later_checkpoints_changes_nothing(trials, monkeypatch):
    trial = trials.train(monkeypatch, SETTINGS)
    run = trial.run
    (run.checkpoints / "00000012" / "abandoned").mkdir()
    before = {path: path.read_bytes() for path in (run.metrics, run.record, run.published, run.experiment)}
    experiment, plan, attempt = trials.job_of(run, trials.experiment(SETTINGS), resume=True)
    attempt = replace(attempt, checkpoint_step=9)
    with pytest.raises(CheckpointError, match="those after step 9 not marked as abandoned"):
        Supervisor(experiment, plan, attempt, LocalLauncher(), None, run_logger(run.messages)).run()
    assert {path: path.read_bytes() for path in before} == before
