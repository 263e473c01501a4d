"""The rate of each step, under each way of falling."""

from itertools import pairwise

import pytest
import torch

from suite.settings import OptimizerSettings
from suite.training.adafactor import Adafactor
from suite.training.update_rule import learning_rate, make_optimizer, state_shapes


def rates(steps, **settings):
    chosen = OptimizerSettings(learning_rate=0.4, warmup_steps=10, **settings)
    return [learning_rate(step, chosen) for step in range(steps)]


def test_rises_to_the_peak_and_falls_with_the_root():
    found = rates(160)
    assert found[0] == pytest.approx(0.04)
    assert max(found) == found[9] == 0.4
    assert found[39] == pytest.approx(0.2)  # four times the warm-up: half the peak
    assert found[159] == pytest.approx(0.1)
    assert found[:10] == sorted(found[:10])
    assert found[9:] == sorted(found[9:], reverse=True)


def test_falls_by_a_factor_every_so_many_steps():
    found = rates(60, lr_decay="exponential", lr_decay_steps=20, lr_decay_factor=0.25)
    assert found[9] == 0.4
    assert found[19] == pytest.approx(0.2)  # half of twenty steps: the root of the factor
    assert found[29] == pytest.approx(0.1)
    assert found[49] == pytest.approx(0.025)


def test_falls_as_half_a_cosine_and_stays_at_nothing():
    found = rates(70, lr_decay="cosine", lr_decay_steps=40)
    assert found[9] == 0.4
    assert found[29] == pytest.approx(0.2)
    assert found[19] == pytest.approx(0.4 * 0.8535533906)
    assert found[49] == pytest.approx(0, abs=1e-12)
    assert found[60] == pytest.approx(0, abs=1e-12)


def test_stays_at_the_peak():
    assert rates(60, lr_decay="constant")[9:] == [0.4] * 51


def test_falls_as_a_line_and_stays_at_nothing():
    found = rates(70, lr_decay="linear", lr_decay_steps=40)
    assert found[9:50:10] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0])
    assert set(found[49:]) == {0}


def test_is_stable_then_falls_as_a_line():
    found = rates(70, lr_decay="wsd", lr_stable_steps=30, lr_decay_steps=20)
    assert set(found[9:40]) == {0.4}
    assert found[39:60:5] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0])
    assert set(found[59:]) == {0}


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


@pytest.mark.parametrize("step", [0, 1000, 19_000, 19_400, 39_999, 99_999])
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


def test_only_adafactor_is_bounded():
    capped = OptimizerSettings(name="adafactor", learning_rate=0.4, warmup_steps=10)
    assert [learning_rate(step, capped) for step in (8, 39)] == [pytest.approx(1 / 3), 40**-0.5]
    assert rates(10)[9] == 0.4


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_adafactor_rests_when_its_rate_has_fallen_to_zero(decay):
    """At a rate of exactly 0 parameters keep their bits and the state goes on: nothing is divided by the rate."""
    settings = OptimizerSettings(
        name="adafactor", learning_rate=0.1, warmup_steps=2, lr_decay=decay, lr_decay_steps=4, weight_decay=0.1,
        lr_stable_steps=1 if decay == "wsd" else 0,
    )  # fmt: skip
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in ((3, 4), (5,))]
    optimizer = make_optimizer(parameters, settings)
    seen, rates_seen = [], []
    for step in range(10):
        rates_seen.append(learning_rate(step, settings))
        optimizer.param_groups[0]["lr"] = rates_seen[-1]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        optimizer.step()
        seen.append([parameter.detach().clone() for parameter in parameters])
    assert rates_seen[-2:] == [0, 0]
    assert all(value.isfinite().all() for values in seen for value in values)
    moved = [not torch.equal(one[0], other[0]) for one, other in pairwise(seen)]
    assert moved == [rate > 0 for rate in rates_seen[1:]]
    assert {float(state["step"]) for state in optimizer.state.values()} == {10}
