"""Gradients in bf16 of random models with biases, convolutions, products and norms: those of the model in one piece.

BF16_MODELS=500 pytest -n 0 --timeout 0 tests/suite/pipeline/runtime/test_bf16_gradients.py      so many of them
"""

import os
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from launch.backends.processes import run_processes
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from tests.micro_batches import split
from tests.suite.pipeline.build import build, join, run, whole
from tests.suite.pipeline.random_pipelines import SquaredError
from tests.suite.pipeline.toy import Weighted

COUNT = int(os.environ.get("BF16_MODELS", "8"))
ROWS, MICRO_BATCHES, CHANNELS, LENGTH = 6, 3, 4, 8


def mix(x, weight):
    return torch.einsum("rcl,cd->rdl", x, weight)


def multiply(x, shift, keys):
    keys = keys.expand(len(x), -1, -1)
    return torch.bmm(torch.baddbmm(shift, x, keys).softmax(-1), keys)


def attend(x, queries, values):
    """Over places, with learned queries."""
    places = x.mT
    return F.scaled_dot_product_attention(queries.expand_as(places), places, places @ values).mT


class TwoDimensional(nn.Conv2d):
    def forward(self, x):
        return super().forward(x[:, None])[:, 0]


LAYERS = {
    "conv1d": lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1),
    "grouped conv1d": lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding="same", groups=2),
    "conv2d": lambda: TwoDimensional(1, 1, 3, padding=1),
    "linear": lambda: nn.Linear(LENGTH, LENGTH),
    "prelu": lambda: nn.PReLU(),
    "layer norm": lambda: nn.LayerNorm(LENGTH),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "einsum": lambda: Weighted(mix, (CHANNELS, CHANNELS)),
    "products": lambda: Weighted(multiply, (1, CHANNELS, LENGTH), (LENGTH, LENGTH)),
    "attention": lambda: Weighted(attend, (LENGTH, CHANNELS), (CHANNELS, CHANNELS)),
}


def model(seed):
    dice = random.Random(seed)
    names = [*dice.sample(list(LAYERS), 4), "linear"]
    with torch.device("meta"):
        return names, [LAYERS[name]() for name in names]


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, CHANNELS, LENGTH, generator=generator) for _ in range(2))
    return ReplicaBatch(split([x], MICRO_BATCHES), split([y], MICRO_BATCHES), float(ROWS))


def of_one_piece(seed, bf16=True):
    """Returns gradients by (layer, name), summed over micro-batches in fp32 as torch does; without bf16 in fp64."""
    _, layers = model(seed)
    made, data = whole(layers), batch(seed)
    if not bf16:
        made = [layer.double() for layer in made]
    for i, (inputs, targets) in enumerate(zip(data.inputs, data.targets, strict=True)):
        inputs = inputs if bf16 else tuple(tensor.double() for tensor in inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            (objective, _) = SquaredError()(*run(made, inputs, seed, i, bf16=bf16), *targets)
        (objective / data.divisor).backward()
    return {(at, name): p.grad.numpy() for at, layer in enumerate(made) for name, p in layer.named_parameters()}


def of_pipelines(rank, world, rendezvous, seeds, schedule):
    join(rank, world, rendezvous)
    found = []
    for seed in seeds:
        _, layers = model(seed)
        config = ScheduleConfig(schedule, (seed % 2,))
        executor, _, named, _ = build(RankCoord(rank, world, 1), layers, SquaredError(), config, precision="bf16")
        executor.train(batch(seed), seed)
        found += [((seed, *key), parameter.grad.numpy()) for key, parameter in named.items()]
    return found


@pytest.fixture(scope="module")
def one_piece():
    return [of_one_piece(seed) for seed in range(COUNT)]


def test_on_one_stage_gradients_have_the_bits_of_the_model_in_one_piece(one_piece):
    (found,) = run_processes(of_pipelines, 1, range(COUNT), "1f1b")
    assert len(found) == sum(map(len, one_piece))
    assert not [key for key, gradient in found if not np.array_equal(gradient, one_piece[key[0]][key[1:]])]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_across_a_cut_they_are_as_close_to_those_in_fp64(one_piece, schedule):
    """A message is contiguous, and deferred products are apart, so kernels may round to 8 bits in another order. Errors
    are shares of the layer's largest gradient, at most 1: where a norm follows, a gradient may be nothing but error.
    One that is missing or doubled has an error of about 1 where one piece has a hundredth."""
    truth = [of_one_piece(seed, bf16=False) for seed in range(COUNT)]
    errors, accepted = [], []
    for stage in run_processes(of_pipelines, 2, range(COUNT), schedule):
        for (seed, *key), gradient in stage:
            exact, other = (gradients[seed][tuple(key)] for gradients in (truth, one_piece))
            largest = max(np.abs(found).max() for (at, _), found in truth[seed].items() if at == key[0])
            errors.append(min(1.0, np.abs(gradient - exact).max() / largest))
            accepted.append(min(1.0, np.abs(other - exact).max() / largest))
    assert max(np.subtract(errors, accepted)) < 0.1
    assert np.mean(errors) < 1.1 * np.mean(accepted)
