"""What a layer does that its training depends on is found and named."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from experiments.custom import layer_traits
from experiments.custom.trial import Trial

ROWS, WIDTH = 4, 6
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
CALLS = itertools.count(1)
IDS = torch.arange(ROWS * 3).view(ROWS, 3)


def traits_of(layer, inputs, rows):
    return layer_traits.traits_of(Trial(layer, inputs), rows)


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


DRAWS, ROWS_DEPEND = "draws random numbers", "has rows that depend on the other rows"
TRAITS = {
    "Dropout": (nn.Dropout(0.3), [DRAWS]),
    "random": (weighted(lambda self, x: x * random.random()), [DRAWS]),
    "numpy": (weighted(lambda self, x: x * float(np.random.rand())), [DRAWS]),
    "BatchNorm": (
        nn.BatchNorm1d(WIDTH),
        ["changes its buffer running_mean and 2 more in each forward", ROWS_DEPEND],
    ),
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
}  # fmt: skip


@pytest.mark.parametrize("name", TRAITS)
def test_each_trait_is_named_and_nothing_else(name):
    layer, expected = TRAITS[name]
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    found = [trait.text for trait in traits_of(layer, (X,), ROWS)]
    assert len(found) == len(expected), found
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_an_input_that_no_output_depends_on_is_named():
    both = nn.Bilinear(WIDTH, WIDTH, 2)
    assert traits_of(both, (X, X.flip(0)), ROWS) == []
    first = Layer(lambda self, x, y: x * self.weight)
    assert [trait.text for trait in traits_of(first, (X, X), ROWS)] == ["ignores its input 1: no gradient reaches it"]


def test_rows_of_ids_count_too():
    embedding = nn.Embedding(ROWS * 3, WIDTH)
    assert traits_of(embedding, (IDS,), ROWS) == []
    from_the_end = Layer(lambda self, ids: (ids.max() - ids).unsqueeze(2) * self.weight)
    assert [trait.text for trait in traits_of(from_the_end, (IDS,), ROWS)] == [f"{ROWS_DEPEND} of their micro-batch"]


def test_rows_of_a_sequence_first_layer_are_those_of_its_second_axis():
    time_first = X.T.contiguous()  # (WIDTH, ROWS)
    over_time = Layer(lambda self, x: x.softmax(0) * self.weight.unsqueeze(1))
    assert traits_of(over_time, (time_first,), ROWS) == []
    over_rows = Layer(lambda self, x: x.softmax(1) * self.weight.unsqueeze(1))
    (trait,) = traits_of(over_rows, (time_first,), ROWS)
    assert trait.text.startswith(ROWS_DEPEND)


def test_a_number_among_the_inputs_has_no_rows():
    scaled = Layer(lambda self, factor, x: factor * x * self.weight)
    assert traits_of(scaled, (torch.tensor(2.0), X), ROWS) == []


def test_one_row_says_nothing_about_rows():
    assert traits_of(weighted(lambda self, x: x.softmax(0)), (X[:1],), 1) == []
