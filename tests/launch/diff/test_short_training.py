"""A model too large for one process, or for a pipeline that ``gpipe check`` would try."""

import re

import pytest
import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.custom.experiment import find_custom
from launch.diff import check, plain_training, short_training
from suite import TrainSpec
from suite.errors import SettingError
from suite.settings import PipelineSettings
from tests.launch.command_line import call, refusal

TWO = PipelineSettings(replicas=2, micro_batches=2)


def wide(layers=40):
    """Its weights, gradients and optimizer take a MiB a layer."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
    middle = [nn.Linear(256, 256) for _ in range(layers - 2)]
    return TrainSpec(
        layers=[nn.Linear(256, 256, bias=False), *middle, nn.Linear(256, 256, bias=False)], loss=nn.MSELoss(),
        train=list(zip(x, x, strict=True)), batch_size=8, micro_batches=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        "train.validate_every=50 train.patience=3 train.profile_steps=20",
        "optimizer.lr_decay=wsd optimizer.warmup_steps=40 optimizer.lr_decay_steps=20",
        "optimizer.lr_decay=cosine optimizer.lr_decay_steps=150 train.threads=2",
    ],
)
def test_what_a_long_run_sets_keeps_no_short_one_from_training(settings):
    name, settings = f"{__file__}:wide", f"train.steps=200 {settings}"
    short, _ = short_training.ShortTraining(name, "auto", 2, settings).resolved()
    assert (short.train.steps, short.train.patience, short.train.threads) == (2, None, 1)
    assert short.optimizer == find_custom(name).with_settings(settings).optimizer, "the rates are those of the long run"
    with pytest.raises(SettingError, match=r"train.steps takes an integer, 1 or more; it was given 0"):
        short_training.ShortTraining(name, "auto", 0, settings).resolved()


@pytest.fixture
def machine(monkeypatch):
    """Sets the memory of two cores in MiB."""

    def set_memory(mib):
        for module in (plain_training, short_training):
            monkeypatch.setattr(module, "this_machine", lambda: Cluster(2, (mib << 20) // 2, "cpu"))

    return set_memory


@pytest.mark.slow
def test_a_pipeline_that_lacks_memory_is_not_tried(machine, tmp_path, monkeypatch):
    machine(70)
    shapes = [TWO, PipelineSettings(stages=2, micro_batches=4)]
    monkeypatch.setattr(check, "_shapes", lambda *_: (shapes, []))
    code, out, errors = call("check", f"{__file__}:wide", "--steps", "1", folder=tmp_path)
    assert (code, errors) == (0, ""), out
    assert re.search(r"not tried: micro_batches=2 replicas=2, because .* needs 0\.0\d GiB", out), out
    assert out.startswith("40 layers, "), out
    assert "  stages=2: same " in out


def test_a_model_too_large_for_one_process_is_refused_with_numbers(machine, tmp_path):
    machine(20)
    found = refusal("check", f"{__file__}:wide", "--steps", "1", folder=tmp_path)
    assert "GiB and there are 0.0; use a machine with more memory, or compare a model with fewer layers" in found


def test_what_a_pipeline_lacks_is_said_if_it_is_memory_and_not_a_fault_that_no_memory_helps(machine):
    machine(42)
    experiment = find_custom(f"{__file__}:wide")
    assert re.search(r"needs 0\.0\d GiB", short_training.memory_fault(experiment.with_pipeline(TWO)))
    machine(200)
    assert short_training.memory_fault(experiment.with_pipeline(TWO)) == ""
    machine(24)
    too_many = experiment.with_pipeline(PipelineSettings(micro_batches=9))
    assert "9 micro-batches" in short_training._fault(too_many, short_training.shared_devices())
    assert short_training.memory_fault(too_many) == ""
