"""Layers that draw from any generator of the host: a recompute repeats their draws, so gradients stay right."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord
from tests.suite.pipeline.build import build, join, mini_batch, unpartitioned

DRAWS = {"torch": lambda: float(torch.rand([])), "random": random.random, "numpy": np.random.random}


class Dropped(nn.Module):
    """LayerDrop: skips its branch in half of all calls; ``draw`` names the generator that decides."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(6, 6, device="meta"), draw

    def reset_parameters(self):
        self.linear.reset_parameters()

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) if DRAWS[self.draw]() < 0.5 else x


class Enter(nn.Linear):
    """A layer that is never dropped, so that every cut has a gradient."""


class Squares(nn.Module):
    def forward(self, x, labels):
        loss = (x - labels[:, None]).square().sum()
        return loss, loss.detach()


def largest_difference(rank, world, rendezvous, draw, remat):
    """Returns how much this stage's gradients differ from those of the whole model, and how many calls were dropped."""
    join(rank, world, rendezvous)
    layers = [layer.double() for layer in (Enter(6, 6, device="meta"), *(Dropped(draw) for _ in range(6)))]
    executor, _, named, _ = build(RankCoord(rank, world, 1), layers, Squares(), remat)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    batch = mini_batch(inputs, torch.arange(1, 9), 4)
    executor.train(batch, 0)
    _, expected = unpartitioned(layers, Squares(), batch, 0)
    differences = [
        float(((0 if p.grad is None else p.grad) - expected[key]).abs().max() / expected[key].abs().max().clamp(1))
        for key, p in named.items()
    ]
    return max(differences), any(gradient.any() for gradient in expected.values())


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_recompute_repeats_the_draws_of(draw, stages):
    for difference, trained in run_processes(largest_difference, stages, draw, "always"):
        assert trained
        assert difference < 1e-12
