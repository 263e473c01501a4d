"""A run of your own with metrics by name, parameter groups and a function that is called after each step."""

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import suite
from experiments.registry import read_experiment_file
from launch.train.command import resume, start
from suite import TrainSpec
from suite.errors import SettingError
from suite.paths import read_json

SEEN = "seen.jsonl"


def correct(scores, labels):
    return (scores.argmax(1) == labels).float().mean()


def confidence(scores, labels):
    return scores.softmax(1).max(1).values.mean()


def note(step, metrics):
    with Path(SEEN).open("a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


def fails(step, metrics):
    if step == 2:
        raise OSError("no such board")


def only_biases(name, parameter):
    return float(parameter.ndim == 1), 0.0


def spec(on_step):
    torch.manual_seed(3)
    x = torch.randn(40, 6)
    rows = TensorDataset(x, x[:, :3].argmax(1))
    return TrainSpec(
        layers=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), loss=nn.CrossEntropyLoss(), train=rows,
        valid=rows, metric={"correct": correct, "confidence": confidence}, on_step=on_step, param_groups=only_biases,
        batch_size=8, steps=4, stages=2,
        settings="optimizer.name=sgd train.validate_every=2 tracking.wandb=disabled train.threads=1",
    )  # fmt: skip


def noted():
    return spec(note)


def failing():
    return spec(fails)


def train(name, settings=""):
    return start(f"{__file__}:{name}", "auto", settings, "local", Console(quiet=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("own"))
        yield train("noted")


def test_each_metric_has_its_name_and_the_function_sees_every_line(run):
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]
    assert [json.loads(line) for line in Path(SEEN).read_text().splitlines()] == lines
    model, data, record = suite.load(run.path, "latest"), noted().valid, read_json(run.record)
    for name, metric in (("correct", correct), ("confidence", confidence)):
        assert all(f"train/{name}" in line or f"valid/{name}" in line for line in lines)
        assert record[f"valid_{name}"] == lines[-1][f"valid/{name}"]
        with torch.no_grad():
            assert record[f"valid_{name}"] == pytest.approx(metric(model(data.tensors[0]), data.tensors[1]).item())
    before = noted().layers
    for (name, old), new in zip(before.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new) == name.endswith("weight")


@pytest.mark.slow
def test_a_run_with_pipeline_auto_has_the_fastest_plan_and_keeps_what_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train("noted", "pipeline=auto pipeline.stages=1")
    chosen, planned = read_experiment_file(run.experiment).pipeline, read_json(run.plan_json)
    assert chosen.stages == 1
    assert (planned["K"], planned["R"], planned["M"]) == (1, chosen.replicas, chosen.micro_batches)
    assert "pipeline.stages 2 -> 1" in read_experiment_file(run.experiment).shrunk
    assert read_json(run.record)["steps"] == 4


def test_a_resume_that_would_drop_the_momentum_is_refused(run):
    with pytest.raises(SettingError, match=r"a resumed run cannot change optimizer\.beta1 to or from 0"):
        resume(str(run.path), "train.steps=8 optimizer.beta1=0", "local", Console(quiet=True))


@pytest.mark.slow
def test_a_function_that_fails_ends_the_run_and_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = fails.__code__.co_firstlineno + 2
    with pytest.raises(
        SettingError, match=rf"on_step of .*:failing, called after step 2, failed at line {line}: OSErr"
    ):
        train("failing")


@pytest.mark.slow
def test_a_resume_says_when_its_settings_raise_the_learning_rate(run):
    said = StringIO()
    resume(str(run.path), "train.steps=5 optimizer.learning_rate=1.0", "local", Console(file=said, width=200))
    assert "the learning rate continues at " in said.getvalue()
