"""A stage that posts messages as on NCCL, here on gloo: it launches what the proof assumes, and computes the same."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime import p2p
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig
from tests.marks import slow_but_for
from tests.suite.pipeline.build import build, join, mini_batch
from tests.suite.pipeline.schedule.nccl_proof import launched
from tests.suite.pipeline.skipping import SumOfErrors, skipping_batch, skipping_layers
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

CONFIGS = [
    ScheduleConfig("fill_drain", (1,)),
    ScheduleConfig("1f1b", (1,)),
    ScheduleConfig("zero_bubble", (2,)),
    ScheduleConfig("interleaved", (1,), 2),
]


class Log:
    """What a stage launches, in the words of the proof: messages, and computations with those that they wait for."""

    def __init__(self, groups):
        self.lines, self.names, self.waited = [], {}, set()
        self.kinds = {id(group): kind for kind in ("activations", "gradients") for group in getattr(groups, kind)}
        self.isend, self.irecv, self.wait = dist.isend, dist.irecv, p2p.wait
        dist.isend, dist.irecv, p2p.wait = self.log_send, self.log_receive, self.log_wait

    def end(self):
        dist.isend, dist.irecv, p2p.wait = self.isend, self.irecv, self.wait

    def log_send(self, tensor, peer, group, tag):
        return self.log_message("the send of {} to stage {}", tensor, self.isend, peer, group, tag)

    def log_receive(self, tensor, peer, group, tag):
        return self.log_message("the receive of {} from stage {}", tensor, self.irecv, peer, group, tag)

    def log_message(self, text, tensor, start, peer, group, tag):
        work = start(tensor, peer, group=group, tag=tag)
        if tag >= 2:  # the others are metadata
            line = text.format(f"{self.kinds[id(group)]} {(tag - 2) // 64 % 4096}", peer)
            self.lines.append(line)
            self.names[work] = line
        return work

    def log_wait(self, work, *others):
        self.waited |= {self.names[work]} if work in self.names else set()
        self.wait(work, *others)

    def mark(self):
        """The executor marks the begin of each computation, after its receives."""

    def record(self, kind, micro_batch, start, virtual_stage):
        self.lines.append((str(Action(kind, micro_batch, virtual_stage)), sorted(self.waited)))
        self.waited.clear()


def launches(rank, world, rendezvous, schedule_configs, micro_batches):
    join(rank, world, rendezvous)
    return [launches_of(RankCoord(rank, world, 1), config, micro_batches) for config in schedule_configs]


def launches_of(coord, schedule_config, micro_batches):
    """Returns what a stage launches in each of its first two training steps, and what before the warm-up ends."""
    executor, _, _, groups = build(coord, toy_layers(torch.float32), SumLoss(), schedule_config)
    batch = mini_batch(*toy_batch(micro_batches, 0), micro_batches)
    log = executor.recorder = Log(groups)
    before, warm_up = [], executor.stage.warm_up

    def logged_warm_up(*arguments):
        warm_up(*arguments)
        before[:] = log.lines

    executor.stage.warm_up = logged_warm_up
    steps = []
    for step in range(2):
        executor.train(batch, step)
        steps.append(without_repeats(log.lines))
        log.lines, log.waited = [], set()
    log.end()
    return steps, before


def without_repeats(lines):
    """A boundary's tensors are messages of their own, with one name."""
    return [line for at, line in enumerate(lines) if not at or line != lines[at - 1]]


def assumed(waits, stage):
    """Returns what the proof says that a stage launches."""
    lines = []
    for wait, causes in zip(waits.names, waits.causes, strict=True):
        if wait.stage != stage or "metadata" in wait.what or "too many" in wait.what:
            continue
        messages = {waits.names[cause].what for cause in causes if waits.names[cause].what.startswith("the ")}
        is_message = wait.what.startswith("the ")
        lines.append(wait.what if is_message else (wait.what, sorted(name for name in messages if " of " in name)))
    return without_repeats(lines)


@pytest.mark.parametrize("stages", slow_but_for([3], [2, 3]))
def test_the_executor_launches_what_the_proof_assumes(stages):
    configs = [replace(config, transport="nccl") for config in CONFIGS]
    for config, *of_stages in zip(configs, *run_processes(launches, stages, configs, 6), strict=True):
        waits = launched(config.actions(stages, 6), config.flow_control(stages))
        for stage, (steps, before_warm_up_ends) in enumerate(of_stages):
            assert before_warm_up_ends == []
            assert steps == [assumed(waits, stage)] * 2
            messages = [line[1] for line in steps[0] if isinstance(line, tuple)]
            assert sum(any("receive" in name for name in names) for names in messages) >= 6


def trained(rank, world, rendezvous, schedule_configs):
    """Returns by schedule a stage's losses, gradients and buffers after two steps with an evaluation between."""
    join(rank, world, rendezvous)
    found = []
    for config in schedule_configs:
        executor, _, named, _ = build(RankCoord(rank, world, 1), skipping_layers(), SumOfErrors(), config)
        batch = mini_batch(*skipping_batch(6, 0, torch.float32), 3)
        sums = [executor.train(batch, 0), executor.evaluate(batch), executor.train(batch, 1)]
        executor.stage.running_stats.update(True)
        tensors = [parameter.grad for parameter in named.values()] + list(executor.stage.layers.buffers())
        found.append((sums, [None if tensor is None else tensor.tolist() for tensor in tensors]))
    return found


@pytest.mark.slow
def test_the_order_of_messages_and_the_warm_up_change_no_bit():
    """The model has skips past stages and BatchNorm, whose averages the warm-up must not touch."""
    on_gloo, on_nccl = (
        run_processes(trained, 2, [replace(config, transport=transport) for config in CONFIGS])
        for transport in ("gloo", "nccl")
    )
    assert on_nccl == on_gloo
    assert all(any(tensors) for _, tensors in on_gloo[1])
