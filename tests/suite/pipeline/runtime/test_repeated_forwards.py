"""Layers whose forward changes their buffers or draws from any generator of the host: a recompute repeats the forward,
with its draws, and counts nothing twice."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from launch.backends.processes import run_processes
from suite.pipeline.model.changing_buffers import ChangingBuffers
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS
from tests.micro_batches import split
from tests.suite.pipeline.build import build, differences, join, run, whole
from tests.suite.pipeline.random_pipelines import SquaredError

WIDTH, ROWS, MICRO_BATCHES, STEPS = 4, 8, 4, 2
SCHEDULES = (
    *(ScheduleConfig("fill_drain", (MAX_LIVE_GRAPHS[remat],)) for remat in MAX_LIVE_GRAPHS),
    ScheduleConfig("1f1b", (1,)),
    ScheduleConfig("zero_bubble", (1,)),
)


class Counter(nn.Module):
    """Counts its calls, in place, also those of evaluation, or in a new tensor. It uses the count before and after, and
    its backward the one after."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(1))

    def reset_parameters(self):
        self.linear.reset_parameters()
        nn.init.zeros_(self.calls)

    def forward(self, x):
        x = x * (1 + 0.01 * self.calls)
        if self.training or self.in_place:
            self.calls = self.calls.add_(1) if self.in_place else self.calls + 1
        return torch.tanh(self.linear(x)) * self.calls


DRAWS = {"torch": lambda: float(torch.rand([])), "random": random.random, "numpy": np.random.random}


class Dropped(nn.Module):
    """LayerDrop: skips its branch in half of all calls; ``draw`` names the generator that decides."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) if DRAWS[self.draw]() < 0.5 else x


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def reset_parameters(self):
        for tensor in (*self.parameters(), *self.buffers()):
            nn.init.normal_(tensor)

    def forward(self, x):
        return self.linear(x)


def layers():
    with torch.device("meta"):
        made = [
            Counter(True),
            Spectral(),
            *map(Dropped, DRAWS),
            Counter(False),
            *map(Dropped, DRAWS),
            nn.Linear(WIDTH, WIDTH),
        ]
    return [layer.double() for layer in made]


def batch():
    generator = torch.Generator().manual_seed(1)
    inputs, wanted = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return ReplicaBatch(split([inputs], MICRO_BATCHES), split([wanted], MICRO_BATCHES), float(ROWS))


def compare(rank, world, rendezvous, schedule_configs):
    """Returns by schedule the differences of gradients and of buffers from one module, after some steps."""
    join(rank, world, rendezvous)
    return [compare_with(RankCoord(rank, world, 1), schedule_config) for schedule_config in schedule_configs]


def compare_with(coord, schedule_config):
    executor, *_ = build(coord, layers(), SquaredError(), schedule_config)
    made = whole(layers())
    for step in range(STEPS):
        for parameter in (p for layer in (*made, *executor.stage.layers) for p in layer.parameters()):
            parameter.grad = None
        executor.evaluate(batch())  # leaves no trace
        executor.train(batch(), step)
        for i, (inputs, targets) in enumerate(zip(batch().inputs, batch().targets, strict=True)):
            (SquaredError()(*run(made, inputs, step, i), *targets)[0] / ROWS).backward()
    named = executor.stage.named_parameters()
    found = list(differences(named, {(at, name): made[at].get_parameter(name).grad for at, name in named}).values())
    for index, layer in zip(executor.stage.indices, executor.stage.layers, strict=True):
        buffers = zip(layer.buffers(), made[index].buffers(), strict=True)
        found += [(own - other).abs().max().item() for own, other in buffers]
    return found


def test_gradients_and_buffers_are_those_of_one_module():
    for config, *of_stages in zip(SCHEDULES, *run_processes(compare, 2, SCHEDULES), strict=True):
        found = [difference for of_stage in of_stages for difference in of_stage]
        assert len(found) == 24
        assert max(found) < 1e-12, (config, found)


def test_a_buffer_that_changes_only_later_is_refused_by_name():
    counter = Counter(True)
    buffers = ChangingBuffers(nn.ModuleList([counter]))
    with buffers.recorded([]):
        pass
    with pytest.raises(RuntimeError, match="Counter changes its buffer calls in some forwards"), buffers.recorded([]):
        counter.calls += 1
