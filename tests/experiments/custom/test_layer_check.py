"""What a layer of one's own does that a pipeline cannot repeat or send is found before any worker starts.

``grammar/refused.py`` has more of it, in whole models.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from experiments.custom import layer_check as check
from experiments.custom.layer_check import refusal
from experiments.custom.trial import Trial

WIDTH = 4
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """Computes ``forward(self, x)`` of a test."""

    def __init__(self, function, **state):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.register_buffer("seen", torch.zeros(1))
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, self.linear(x))


def counts_in_a_buffer(self, x):
    self.seen += 1
    return x * self.seen


def counts_in_an_attribute(self, x):
    self.calls += 1
    return x * self.calls


def grows(self, x):
    self.cache.append(x.detach())
    return x + torch.stack(self.cache).sum(0)


def adds_its_first_rows(self, x):
    self.cache.append(x.detach())
    return x + self.cache[0]


def takes_its_first_rows(self, x):
    self.cache.append(x.detach())
    if not torch.equal(self.cache[0], x):
        raise ValueError("other rows")
    return x


def only_once(self, x):
    if self.calls:
        raise KeyError("again")
    self.calls += 1
    return x


def more_each_time(self, x):
    self.calls += 1
    return (x,) * self.calls


def forgets_a_buffer(self, x):
    self.seen = None
    return x


def shrinks_its_parameter(self, x):
    self.linear.weight.data.mul_(0.9)
    return torch.zeros_like(x)


class ForgetsToReturn(Layer):
    def train(self, mode=True):
        super().train(mode)


def branches_on_values(self, x):
    return x if x.is_meta or x.sum() > 0 else -x


GOOD = {
    "plain": Layer(lambda self, x: torch.tanh(x)),
    "dropout": Layer(lambda self, x: nn.functional.dropout(x)),
    "Python's random": Layer(lambda self, x: x if random.random() < 0.5 else -x),
    "numpy's random": Layer(lambda self, x: x * float(np.random.rand())),
    "a buffer": Layer(counts_in_a_buffer),
    "spectral norm": spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "a buffer in evaluation": Layer(lambda self, x: x + self.seen.add_(1)),
    "NaN": Layer(lambda self, x: x * torch.nan),
    "integers": Layer(lambda self, x: (x > 0).long()),
    "what it saw last": Layer(lambda self, x: setattr(self, "last", x.detach()) or x),
    "a buffer, and what it saw last": Layer(lambda self, x: setattr(self, "last", x) or counts_in_a_buffer(self, x)),
    "an LSTM": Layer(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(WIDTH, WIDTH)),
    "a train that returns nothing": ForgetsToReturn(lambda self, x: x),
    "complex inside": Layer(lambda self, x: torch.fft.irfft(torch.fft.rfft(x), n=WIDTH)),
}
BAD = {
    "a count in a module": (
        check.repeats_its_forward, nn.Sequential(nn.Tanh(), Layer(counts_in_an_attribute, calls=0)),
        "it changes its attribute 1.calls",
    ),
    "a cache that grows": (check.repeats_its_forward, Layer(grows, cache=[]), "it changes its attribute cache"),
    "a cache of the first rows": (
        check.forgets_other_rows, Layer(adds_its_first_rows, cache=[]),
        "changes its attribute cache, and returns other values after other rows",
    ),
    "a second forward that fails": (
        check.repeats_its_forward, Layer(only_once, calls=0), "fails in another forward from the same state",
    ),
    "another number of outputs": (
        check.repeats_its_forward, Layer(more_each_time, calls=0), "would not repeat its forward",
    ),
    "a buffer that goes": (
        check.takes_its_inputs, Layer(forgets_a_buffer),
        "removes its buffer seen in a forward; change its value instead",
    ),
    "detached outputs": (
        check.has_gradients, Layer(lambda self, x: x.detach()), "returns nothing that depends on its parameters",
    ),
    "a parameter that changes": (
        check.keeps_its_parameters, Layer(shrinks_its_parameter), "changes its parameter linear.weight in a forward",
    ),
    "a fault of evaluation": (
        check.evaluates_with_the_same_shapes, Layer(lambda self, x: x if self.training else x @ x),
        "fails in evaluation mode",
    ),
    "a cache that does not fit other rows": (
        check.forgets_other_rows, Layer(takes_its_first_rows, cache=[]), "fails after other rows (ValueError:",
    ),
    "no tensors": (check.returns_tensors, Layer(lambda self, x: ()), "returns no tensors; it must return one"),
    "a cache of one row": (check.forgets_other_rows, Layer(adds_its_first_rows, cache=[]), "after other rows", X[:1]),
    "a branch on values": (check.runs_without_values, Layer(branches_on_values), "does not run on tensors without"),
    "fp16": (check.trains_its_parameters, nn.Linear(WIDTH, WIDTH).half(), "trains weight in float16"),
}  # fmt: skip
"""Faults by name: the rule that finds them, the layer, what the rule says, and other inputs than ``X``."""


@pytest.mark.parametrize("name", GOOD)
def test_layers_that_a_pipeline_can_run_pass_and_keep_their_buffers(name):
    layer = GOOD[name]
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    assert refusal(Trial(layer, (X,))) == ""
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("name", BAD)
def test_a_layer_that_it_cannot_repeat_or_send_is_refused_with_the_reason(name):
    rule, layer, reason, *inputs = BAD[name]
    trial = Trial(layer, tuple(inputs) or (X,))
    finder, said = next((each, said) for each in check.RULES if (said := each(trial)))
    assert finder is rule, said
    assert reason in said


def test_each_rule_refuses_something():
    assert {rule for rule, *_ in BAD.values()} == {*check.RULES}
