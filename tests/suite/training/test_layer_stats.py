"""What a run notes of its layers: norms that add up to the run's, kurtosis, the same at every K."""

import json

import pytest
import torch

from suite.training.layer_stats import kurtosis
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


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_layers_are_noted_alike_at_every_k_and_across_a_death(tmp_path, monkeypatch):
    trials = Trials(tmp_path)
    alone = trials.train(monkeypatch, f"{SETTINGS} pipeline.stages=1")
    noted = read(alone.run.layers)
    assert [line["step"] for line in noted] == [1, 2, 4, 6]
    norms = {line["step"]: line["train/grad_norm"] for line in read(alone.run.metrics)}
    for line in noted:
        assert sum(norm**2 for norm in line["norms"]) ** 0.5 == pytest.approx(norms[line["step"]])
        assert all(value is not None for value in line["kurtosis"][:-1])
        assert line["kurtosis"][-1] is None  # logits never stand whole
    kill = {"fault": "kill", "stage": 1, "step": 4, "action": "B1"}
    struck = trials.train(monkeypatch, f"{SETTINGS} pipeline.stages=3", [kill])
    assert len(struck.ends) == 2
    assert read(struck.run.layers) == noted
