"""What a layer does that its training depends on is found and named."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from experiments.custom.layer_traits import traits_of
from experiments.custom.trial import Trial

ROWS, WIDTH = 4, 6
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
CALLS = itertools.count(1)
IDS = torch.arange(ROWS * 3).view(ROWS, 3)
TIME_FIRST = X.T.contiguous()
"""Its second axis has the rows."""


class Layer(nn.Module):
    """Computes ``function(self, *inputs)`` of a test."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function, self.own = function, torch.Generator()

    def forward(self, *inputs):
        return self.function(self, *inputs)


def weighted(function):
    return Layer(lambda self, x: function(self, x * self.weight))


def counts(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return x * self.weight if self.calls < 5 else -x


def spectral_norm_that_goes_on():
    """Its singular values are so close that the iterations before the first forward do not reach the largest one."""
    linear = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        linear.weight.copy_(torch.diag(torch.linspace(1, 0.9, WIDTH)))
    return spectral_norm(linear)


DRAWS, ROWS_DEPEND = "draws random numbers", "has rows that depend on the other rows of their micro-batch"
TRAITS = {
    "Dropout": (nn.Dropout(0.3), [DRAWS]),
    "random": (weighted(lambda self, x: x * random.random()), [DRAWS]),
    "numpy": (weighted(lambda self, x: x * float(np.random.rand())), [DRAWS]),
    "BatchNorm": (nn.BatchNorm1d(WIDTH), ["changes its buffer running_mean and 2 more in each forward", ROWS_DEPEND]),
    "two BatchNorms": (
        nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)),
        ["changes its buffer 0.running_mean and 5 more in each forward", ROWS_DEPEND],
    ),
    "BatchNorm without statistics": (nn.BatchNorm1d(WIDTH, track_running_stats=False), [ROWS_DEPEND]),
    "softmax over rows": (weighted(lambda self, x: x.softmax(0)), [ROWS_DEPEND]),
    "a mean over all": (weighted(lambda self, x: x - x.mean()), [ROWS_DEPEND]),
    "dropout and a mean over rows": (
        weighted(lambda self, x: nn.functional.dropout(x, 0.5) + x.mean(0)), [DRAWS, ROWS_DEPEND],
    ),
    "spectral norm": (spectral_norm_that_goes_on(), ["changes its buffer parametrizations.weight.0._u"]),
    "evaluation": (
        weighted(lambda self, x: 2 * x if self.training else x), ["computes something else in evaluation mode"],
    ),
    "an unused parameter": (Layer(lambda self, x: x.tanh()), ["ignores its weight: no gradient reaches it"]),
    "a global count": (weighted(lambda self, x: x * next(CALLS)), ["returns other values for the same inputs"]),
    "frozen": (weighted(lambda self, x: x).requires_grad_(False), []),
    "the row before": (weighted(lambda self, x: x.roll(1, 0)), [ROWS_DEPEND]),
    "weak softmax over rows": (weighted(lambda self, x: x + 1e-3 * x.softmax(0)), [ROWS_DEPEND]),
    "a mean over rows beside": (weighted(lambda self, x: (x, x.mean(0))), [ROWS_DEPEND]),
    "transposed": (weighted(lambda self, x: x.T), []),
    "NaN": (weighted(lambda self, x: x * torch.nan), []),
    "a count": (Layer(counts), ["changes its attribute calls in each forward, and again in each recompute"]),
    "a generator": (
        Layer(lambda self, x: x * self.weight + torch.rand(1, generator=self.own)),
        ["draws from its own generator own in each forward, and again in each recompute"],
    ),
    "two inputs": (nn.Bilinear(WIDTH, WIDTH, 2), [], X, X.flip(0)),
    "an unused input": (
        Layer(lambda self, x, y: x * self.weight), ["ignores its input 1: no gradient reaches it"], X, X,
    ),
    "rows of ids": (nn.Embedding(ROWS * 3, WIDTH), [], IDS),
    "ids from the largest": (Layer(lambda self, ids: (ids.max() - ids)[:, :, None] * self.weight), [ROWS_DEPEND], IDS),
    "softmax over the time of rows on the second axis": (
        Layer(lambda self, x: x.softmax(0) * self.weight[:, None]), [], TIME_FIRST,
    ),
    "softmax over rows on the second axis": (
        Layer(lambda self, x: x.softmax(1) * self.weight[:, None]), [ROWS_DEPEND], TIME_FIRST,
    ),
    "a number among the inputs": (Layer(lambda self, factor, x: factor * x * self.weight), [], torch.tensor(2.0), X),
}  # fmt: skip
"""Layers, what is said of each, and their inputs if these are not ``X``."""


@pytest.mark.parametrize("name", TRAITS)
def test_each_trait_is_named_and_nothing_else(name):
    layer, expected, *inputs = TRAITS[name]
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    found = [trait.text for trait in traits_of(Trial(layer, inputs or (X,)), ROWS)]
    assert len(found) == len(expected), found
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_one_row_says_nothing_about_rows():
    assert traits_of(Trial(weighted(lambda self, x: x.softmax(0)), (X[:1],)), 1) == []
