"""What a run notes of its layers: norms that add up to the run's, kurtosis, sizes and changes, the same at every K."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.stage import Stage
from suite.pipeline.schedule.action import Action
from suite.training import layer_stats
from suite.training.layer_stats import LayerStats, kurtosis
from suite.training.metrics import read_steps
from tests.slow.trial import Trials

SETTINGS = "train.steps=6 train.layer_stats_every=2 train.checkpoint_every=3"


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (torch.distributions.Normal(3.0, 2.0), 0.0),
        (torch.distributions.Uniform(-1.0, 4.0), -1.2),
        (torch.distributions.Laplace(1.0, 5.0), 3.0),
    ],
)
def test_kurtosis_of_what_is_known(draw, expected):
    torch.manual_seed(0)
    assert kurtosis(draw.sample((400_000,))) == pytest.approx(expected, abs=0.15)


class Dropped(nn.Linear):
    """It works in place, too."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x.mul_(2)), 0.5, self.training)


def change_of(make_layer, x, update, precision, path, monkeypatch):
    """Returns the recorded change by ``update(stage)``, for the input x."""
    monkeypatch.setattr(layer_stats, "all_gather", lambda values: [values])
    with torch.device("meta"):
        layers = [make_layer()]
    stage = Stage(layers, [range(1)], None, torch.device("cpu"), precision, seed=0)
    executor = SimpleNamespace(stage=stage, coord=RankCoord(0, 1, 1), status=SimpleNamespace(action=None))
    stats = LayerStats(executor, 1, 0, path)
    stage.running_stats.begin(0)
    with stats.recording(0), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for factor, action in enumerate((Action("F", 0), Action("F", 1), Action("R", 0)), start=1):
            executor.status.action = action
            stage.layers[0](x.clone() * factor)
    with stats.updating():
        update(stage)
    stats.write(0, (0.1,))
    assert stage.layers.training
    (line,) = read(path)
    return line["change_rms"][0]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("size", [1, 1e-4])
def test_the_change_is_that_of_the_same_input_without_dropout(size, precision, dtype, tmp_path, monkeypatch):
    """A linear layer whose update adds a matrix: its output changes by the input's product with the matrix, even where
    bf16 rounds it away."""
    x, matrix = torch.rand(50, 8).to(dtype), size * torch.rand(6, 8)

    def update(stage):
        stage.layers[0].weight.data += matrix

    found = change_of(lambda: Dropped(8, 6, bias=False), x, update, precision, tmp_path / "layers.jsonl", monkeypatch)
    assert found == pytest.approx((2 * x.float() @ matrix.T).square().mean().sqrt().item(), rel=1e-3)


def test_running_statistics_are_no_change(tmp_path, monkeypatch):
    """They follow the mini-batch in the same moment as the parameters follow the gradient."""

    def update(stage):
        before = stage.layers[0].running_mean.clone()
        stage.running_stats.update(True)
        assert not torch.equal(stage.layers[0].running_mean, before)

    x = torch.randn(50, 8, 3, 3) + 3
    assert change_of(lambda: nn.BatchNorm2d(8), x, update, "fp32", tmp_path / "layers.jsonl", monkeypatch) == 0


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_layers_are_noted_alike_at_every_k_and_across_a_death(tmp_path, monkeypatch):
    trials = Trials(tmp_path)
    alone = trials.train(monkeypatch, f"{SETTINGS} pipeline.stages=1")
    noted = read(alone.run.layers)
    assert [line["step"] for line in noted] == [1, 2, 4, 6]
    norms = {line["step"]: line["train/grad_norm"] for line in read_steps(alone.run.metrics)}
    for line in noted:
        assert sum(norm**2 for norm in line["norms"]) ** 0.5 == pytest.approx(norms[line["step"]])
        for name in ("kurtosis", "output_rms", "change_rms"):
            assert all(value is not None for value in line[name][:-1]), name
            assert line[name][-1] is None  # logits never stand whole
        assert all(0 < change < size for change, size in zip(line["change_rms"][:-1], line["output_rms"], strict=False))
    kill = {"fault": "kill", "stage": 1, "step": 4, "action": "B1"}
    struck = trials.train(monkeypatch, f"{SETTINGS} pipeline.stages=3", [kill])
    assert len(struck.ends) == 2
    assert read(struck.run.layers) == noted
