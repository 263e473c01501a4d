"""Training steps of a work on one device, beside what a plan says of the same stage."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiments.flops import hardware_flops, model_flops
from launch.gpu.lone import REMAT, Lone, forget, rebuilt, seconds
from launch.gpu.work import Sizes, Work
from suite.pipeline.allocation import Allocation
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import DEVICES, Device, this_device
from suite.pipeline.estimate import estimate
from suite.pipeline.memory import bytes_per_parameter
from suite.pipeline.plan import Machine, make_plan
from suite.pipeline.profile import MicroBatch, Sample, profile
from suite.pipeline.recorder import Recorder
from suite.settings import OptimizerSettings, PipelineSettings
from suite.training.optimizer import lone_update

WARM_UPS = 2

UNBOUNDED = 1 << 62
"""Bytes: a plan that is only compared is refused by no memory."""


@dataclass(frozen=True)
class Planned:
    """What a plan says of a stage that is the whole pipeline: seconds of a step, peak bytes."""

    step_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Trained:
    """A work's steps: medians in seconds, bytes, and the losses of all steps, a mean over tokens each."""

    work: Work
    train_s: float
    """Forward, rebuild and backward of all micro-batches."""
    update_s: float
    actions: dict[str, float]
    """Of one action of each kind, by the device's clock: F, R, B."""
    peak_bytes: int
    losses: tuple[float, ...]
    profiled: Planned
    """From costs measured on this device."""
    estimated: Planned
    """From the rates of a declared device."""
    estimated_for: str

    @property
    def step_s(self) -> float:
        """Both parts."""
        return self.train_s + self.update_s

    @property
    def model_flops(self) -> float:
        """Of a step, without rebuilds."""
        return model_flops(self.work.forward_flops, self.work.micro_batches)

    @property
    def hardware_flops(self) -> float:
        """Of a step, with rebuilds."""
        count = self.work.micro_batches
        return hardware_flops(self.work.forward_flops, count, rebuilt(count))

    @property
    def tokens_per_s(self) -> float:
        """Of a step with its update."""
        return self.work.tokens / self.step_s

    @property
    def fault(self) -> str | None:
        """What is wrong, in a sentence without its end; None if nothing is."""
        if all(map(math.isfinite, self.losses)):
            return None
        step = next(at for at, loss in enumerate(self.losses) if not math.isfinite(loss))
        return f"the loss of {self.work.name} is {self.losses[step]} in step {step}"

    @property
    def fell(self) -> bool:
        """Whether the last loss is below the first."""
        return self.losses[-1] < self.losses[0]


def product_rate(sizes: Sizes, device: torch.device) -> float:
    """Returns operations a second of a large bf16 product, the median of several rounds.

    The factors are random: of equal numbers a GPU draws less power and clocks higher, by a tenth.
    """
    side = sizes.product
    left, right = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def some() -> None:
        for _ in range(sizes.product_repeats):
            torch.mm(left, right, out=out)

    some()
    times = [seconds(some, device) for _ in range(sizes.product_rounds)]
    return 2.0 * side**3 * sizes.product_repeats / statistics.median(times)


def trained(work: Work, sizes: Sizes, device: torch.device) -> Trained:
    """Plans the work, then trains it: two steps to weigh and to warm up, the timed ones, one with every action noted.

    Bytes are counted from before the first weight to the end of the second step.
    """
    settings = sizes.optimizer
    one = work.feed(device)[0]
    measured = profile(
        work.layers, work.loss, Sample(one, one), device, settings.precision, lambda m: lone_update(m, settings)
    )
    profiled = planned(measured, work, settings)
    declared = declared_device(device)
    estimated = planned(_estimate(work, one, declared, settings), work, settings)
    del one
    forget(device)
    with Allocation(device) as allocation:
        lone = Lone(work, device, settings)
        losses = [_step(lone, step) for step in range(WARM_UPS)]
    trains, updates, more = _timed(lone, sizes.steps)
    actions, last = _noted(lone, WARM_UPS + sizes.steps)
    return Trained(
        work, statistics.median(trains), statistics.median(updates), actions, allocation.peak,
        (*losses, *more, last), profiled, estimated, declared.name,
    )  # fmt: skip


def _timed(lone: Lone, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Returns seconds of training and of updates, and losses."""
    trains, updates, losses = [], [], []
    for step in range(WARM_UPS, WARM_UPS + steps):
        trains.append(seconds(lambda at=step: losses.append(lone.train(at)), lone.device))  # type: ignore[misc]
        updates.append(seconds(lone.update, lone.device))
    return trains, updates, losses


def _noted(lone: Lone, step: int) -> tuple[dict[str, float], float]:
    """Runs a step with every action noted; returns the median seconds of each kind, and the loss."""
    lone.executor.recorder = recorder = Recorder(lone.device)
    recorder.begin()
    loss = _step(lone, step)
    spans = recorder.spans()
    return {kind: statistics.median([s.seconds for s in spans if s.kind == kind] or [0.0]) for kind in "FRB"}, loss


def planned(costs: Sequence[LayerCost], work: Work, settings: OptimizerSettings) -> Planned:
    """Returns what ``make plan`` would say of the work as one stage of one replica."""
    pipeline = PipelineSettings(stages=1, micro_batches=work.micro_batches, remat=REMAT)
    each = bytes_per_parameter(settings, replicas=1)
    plan = make_plan(costs, len(work.layers), pipeline, each, Machine(UNBOUNDED))
    return Planned(plan.step_s, plan.stages[0].peak_bytes)


def declared_device(device: torch.device) -> Device:
    """Returns what is declared of this GPU, known by its name; of another device its own rates."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = [one for name, one in DEVICES.items() if name.lower() in properties.name.lower()]
        return known[0] if known else this_device(properties.total_memory)
    return this_device(0)


def _estimate(work: Work, one: MicroBatch, device: Device, settings: OptimizerSettings) -> list[LayerCost]:
    inputs = tuple(tensor.detach().cpu().requires_grad_(tensor.requires_grad) for tensor in one.inputs)
    host = MicroBatch(inputs, tuple(tensor.cpu() for tensor in one.targets))
    return estimate(work.layers, work.loss, host, device, settings)


def _step(lone: Lone, step: int) -> float:
    loss = lone.train(step)
    lone.update()
    return loss
