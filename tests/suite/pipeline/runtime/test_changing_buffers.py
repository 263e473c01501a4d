"""Layers whose forward changes their buffers: a recompute repeats the forward, and counts nothing twice."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from launch.backends.processes import run_processes
from suite.pipeline.model.changing_buffers import ChangingBuffers
from suite.pipeline.model.microbatch import ReplicaBatch, split
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS
from tests.suite.pipeline.build import build, join, run, whole

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


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def reset_parameters(self):
        for tensor in (*self.parameters(), *self.buffers()):
            nn.init.normal_(tensor)

    def forward(self, x):
        return self.linear(x)


class Loss(nn.Module):
    def forward(self, out, wanted):
        loss = (out - wanted).square().sum()
        return loss, loss.detach()


def layers():
    with torch.device("meta"):
        made = [Counter(True), Spectral(), nn.Linear(WIDTH, WIDTH), Counter(False), nn.Linear(WIDTH, WIDTH)]
    return [layer.double() for layer in made]


def batch():
    generator = torch.Generator().manual_seed(1)
    inputs, wanted = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return ReplicaBatch(split([inputs], MICRO_BATCHES), split([wanted], MICRO_BATCHES), float(ROWS))


def compare(rank, world, rendezvous, schedule_config):
    """Returns the largest differences of gradients and of buffers from one module, after some steps."""
    join(rank, world, rendezvous)
    executor, *_ = build(RankCoord(rank, world, 1), layers(), Loss(), schedule_config)
    made = whole(layers())
    for step in range(STEPS):
        for parameter in (p for layer in (*made, *executor.stage.layers) for p in layer.parameters()):
            parameter.grad = None
        executor.evaluate(batch())  # leaves no trace
        executor.train(batch(), step)
        for i, (inputs, targets) in enumerate(zip(batch().inputs, batch().targets, strict=True)):
            (Loss()(*run(made, inputs, step, i), *targets)[0] / ROWS).backward()
    differences = []
    for index, layer in zip(executor.stage.indices, executor.stage.layers, strict=True):
        for (name, own), (_, other) in zip(layer.named_parameters(), made[index].named_parameters(), strict=True):
            differences.append(((index, name), (own.grad - other.grad).abs().max().item()))
        for (name, own), (_, other) in zip(layer.named_buffers(), made[index].named_buffers(), strict=True):
            differences.append(((index, name), (own - other).abs().max().item()))
    return differences


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "schedule_config", SCHEDULES, ids=lambda config: f"{config.schedule}-{config.max_live_graphs[0]}"
)
def test_gradients_and_buffers_are_those_of_one_module(stages, schedule_config):
    found = [difference for results in run_processes(compare, stages, schedule_config) for difference in results]
    assert len(found) == 14
    assert max(value for _, value in found) < 1e-12, found


def test_a_buffer_that_changes_only_later_is_refused_by_name():
    counter = Counter(True)
    buffers = ChangingBuffers(nn.ModuleList([counter]))
    with buffers.recorded([]):
        pass
    with pytest.raises(RuntimeError, match="Counter changes its buffer calls in some forwards"), buffers.recorded([]):
        counter.calls += 1
