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
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_change_is_that_of_the_same_input_without_dropout(precision, tmp_path, monkeypatch):
    """A linear layer whose update adds a matrix: its output changes by the input's product with the matrix."""
    monkeypatch.setattr(layer_stats, "gather", lambda values: [values])
    with torch.device("meta"):
        layers = [Dropped(8, 6, bias=False)]
    stage = Stage(layers, [range(1)], None, torch.device("cpu"), precision, seed=0)
    executor = SimpleNamespace(
        stage=stage,
        coord=RankCoord(0, 1, 1),
        status=SimpleNamespace(action=Action("F", 0, 0)),
    )
    stats = LayerStats(executor, 1, 0, tmp_path / "layers.jsonl")
    x, matrix = torch.rand(50, 8), torch.rand(6, 8)
    weight = stage.layers[0].weight
    nn.init.constant_(weight, 0.5)
    with stats.recording(0), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        stage.layers[0](x)
    with stats.updating():
        weight.data += matrix
    stats.write(0, (0.1,))
    (line,) = read(tmp_path / "layers.jsonl")
    expected = (x @ matrix.T).square().mean().sqrt().item()
    assert line["change_rms"] == [pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)]
    assert stage.layers.training


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
