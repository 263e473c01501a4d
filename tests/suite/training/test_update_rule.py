"""The rate of each step, under each way of falling."""

import pytest
import torch

from suite.settings import OptimizerSettings
from suite.training.adafactor import Adafactor
from suite.training.update_rule import learning_rate, make_optimizer, state_shapes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {39: 0.2, 159: 0.1}),  # four times the warm-up: half the peak
        (
            {"lr_decay": "exponential", "lr_decay_steps": 20, "lr_decay_factor": 0.25},
            {19: 0.2, 29: 0.1, 49: 0.025},  # half of twenty steps: the root of the factor
        ),
        ({"lr_decay": "cosine", "lr_decay_steps": 40}, {19: 0.4 * 0.8535533906, 29: 0.2, 49: 0, 60: 0}),
        ({"lr_decay": "constant"}, {159: 0.4}),
        ({"lr_decay": "linear", "lr_decay_steps": 40}, {19: 0.3, 29: 0.2, 39: 0.1, 49: 0, 60: 0}),
        (
            {"lr_decay": "wsd", "lr_stable_steps": 30, "lr_decay_steps": 20},
            {39: 0.4, 44: 0.3, 49: 0.2, 54: 0.1, 59: 0, 60: 0},
        ),
    ],
    ids=str,
)
def test_the_rate_rises_as_a_line_and_falls_as_its_name_says(settings, expected):
    chosen = OptimizerSettings(learning_rate=0.4, warmup_steps=10, **settings)
    found = [learning_rate(step, chosen) for step in range(160)]
    assert found[:10] == pytest.approx([0.04 * (step + 1) for step in range(10)])
    assert max(found) == found[9] == 0.4
    assert found[9:] == sorted(found[9:], reverse=True)
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("beta1", [0, 0.9])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "rmsprop", "sgd"])
def test_the_state_is_what_the_optimizer_allocates(name, beta1):
    """Plans, ZeRO and checkpoints go by these names and shapes."""
    settings = OptimizerSettings(name=name, beta1=beta1)
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = make_optimizer([parameter], settings)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {key: tuple(value.shape) for key, value in optimizer.state[parameter].items() if value is not None}
    assert state == state_shapes((2, 3), settings)


@pytest.mark.parametrize("step", [0, 19_400, 99_999])
def test_the_rate_of_adafactor_is_the_one_that_acts(step):
    """A parameter of ones, whose gradient is as large as ever: what it loses is the rate."""
    settings = OptimizerSettings(name="adafactor", learning_rate=0.015, warmup_steps=40_000)
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    rate = learning_rate(step, settings)
    optimizer = Adafactor([parameter], lr=rate)
    optimizer.state[parameter] = {"step": torch.tensor(float(step)), "variance": torch.ones_like(parameter)}
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (1 - parameter.detach()).tolist() == pytest.approx([rate] * 4, rel=1e-9)
    assert rate == pytest.approx(min(0.015 * (step + 1) / 40_000, (step + 1) ** -0.5))
