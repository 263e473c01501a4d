"""Random layers with draws and state: the trial passes them, and their recomputes are exact.

RANDOM_LAYERS=1000 pytest -n 0 --timeout 0 tests/experiments/custom/test_random_layers.py      so many of them
"""

import os
import random

import numpy as np
import torch
from torch import nn

from experiments.custom.layer_check import refusal
from experiments.custom.trial import Trial
from launch.backends.processes import run_processes
from suite.pipeline.model.layers import materialize
from suite.pipeline.model.microbatch import ReplicaBatch, split
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.build import build, join
from tests.suite.pipeline.random_pipelines import SquaredError

COUNT = int(os.environ.get("RANDOM_LAYERS", "12"))
WIDTH, ROWS, MICRO_BATCHES, STEPS, LAYERS = 3, 6, 3, 2, 3


def adds_to(buffer):
    def apply(layer, x):
        setattr(layer, buffer, getattr(layer, buffer) + x.detach().mean())
        return x * torch.tanh(getattr(layer, buffer))

    return apply


def averages_in_place(layer, x):
    layer.mean.lerp_(x.detach().mean(0), 0.3)
    return x - layer.mean


def counts_in_evaluation(layer, x):
    layer.count.add_(1)
    return x * (1 + 0.1 * layer.count)


EXACT = {
    "torch": lambda layer, x: nn.functional.dropout(x, 0.4, layer.training),
    "numpy": lambda layer, x: x * float(np.random.rand()),
    "random": lambda layer, x: -x if layer.training and random.random() < 0.5 else x,
    "normal": lambda layer, x: x + torch.randn_like(x) * 0.1,
    "permutation": lambda layer, x: x[:, torch.randperm(WIDTH)] if not x.is_meta else x,
    "sum": adds_to("total"),
    "average": averages_in_place,
    "count": counts_in_evaluation,
    "square": lambda layer, x: x.square(),
}


class Composed(nn.Module):
    """A linear layer, then some operations one after another."""

    def __init__(self, names):
        super().__init__()
        self.names, self.linear = names, nn.Linear(WIDTH, WIDTH)
        for buffer, shape in (("total", 1), ("mean", WIDTH), ("count", 1)):
            self.register_buffer(buffer, torch.zeros(shape))

    def reset_parameters(self):
        self.linear.reset_parameters()
        for buffer in self.buffers():
            nn.init.zeros_(buffer)

    def forward(self, x):
        x = self.linear(x)
        for name in self.names:
            x = EXACT[name](self, x)
        return torch.tanh(x)


def drawn(seed):
    return tuple(random.Random(seed).choices(list(EXACT), k=1 + seed % 4))


def model(seed):
    """Returns layers on the meta device with what can be repeated."""
    with torch.device("meta"):
        return [Composed(drawn(seed * LAYERS + at)) for at in range(LAYERS)]


def state_of_steps(rank, world, rendezvous, seeds, graphs):
    """Trains each model for some steps, with an evaluation between; returns gradients and buffers of this stage."""
    join(rank, world, rendezvous)
    found = []
    for seed in seeds:
        executor, *_ = build(RankCoord(rank, world, 1), model(seed), SquaredError(), ScheduleConfig("1f1b", (graphs,)))
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        batch = ReplicaBatch(split([x], MICRO_BATCHES), split([y], MICRO_BATCHES), float(ROWS))
        for step in range(STEPS):
            executor.train(batch, step)
            executor.evaluate(batch)
        for index, layer in zip(executor.stage.indices, executor.stage.layers, strict=True):
            gradients = {f"gradient of {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
            found += [
                (seed, index, name, t.numpy().copy()) for name, t in (gradients | dict(layer.named_buffers())).items()
            ]
    return found


def test_a_recompute_of_what_the_trial_passes_is_exact():
    x = torch.randn(ROWS, WIDTH)
    for seed in range(COUNT):
        for layer in model(seed):
            assert refusal(Trial(materialize(layer, seed, torch.device("cpu")), (x,))) == "", layer.names
    runs = []
    for stages, graphs in ((1, UNLIMITED), (1, 0), (2, 1)):
        found = run_processes(state_of_steps, stages, range(COUNT), graphs)
        runs.append({tuple(place): value for stage in found for (*place, value) in stage})
    without, *others = runs
    assert len(without) == COUNT * LAYERS * 5
    for other in others:
        assert not [place for place in without if not np.array_equal(without[place], other[place], equal_nan=True)]
