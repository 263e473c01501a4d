"""Training steps of a work on one device, compared with the plan of the same stage."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from launch.gpu_check.single_stage import SingleStageTrainer, empty_cache, seconds
from launch.gpu_check.work import REMAT, SingleStageWorkload, Sizes
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, Device, Machine, this_device
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.memory_tracker import MemoryTracker
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.profile import MicroBatch, Sample, profile
from suite.pipeline.runtime.recorder import Recorder
from suite.settings import OptimizerSettings, PipelineSettings
from suite.training.optimizer import single_device_update

WARM_UPS = 2

UNBOUNDED = 1 << 62
"""A memory limit in bytes that no plan exceeds."""


@dataclass(frozen=True)
class Prediction:
    """What a plan predicts for a pipeline of one stage: seconds of a step, peak bytes."""

    step_s: float
    peak_bytes: int


@dataclass(frozen=True)
class TrainResult:
    """A work's steps: medians in seconds, bytes, and each step's mean loss a token."""

    work: SingleStageWorkload
    train_s: float
    """Forward, recomputation and backward of all micro-batches."""
    update_s: float
    actions: dict[str, float]
    """Median seconds of an action of each kind (F, R, B), by the device's clock."""
    peak_bytes: int
    losses: tuple[float, ...]
    profiled: Prediction
    """From costs measured on this device."""
    estimated: Prediction
    """From the rates of a declared device."""
    estimated_for: str

    @property
    def step_s(self) -> float:
        """Training and update."""
        return self.train_s + self.update_s

    @property
    def tokens_per_s(self) -> float:
        """Target tokens a second, updates included."""
        return self.work.tokens / self.step_s

    @property
    def fault(self) -> str | None:
        """The fault, as a clause; None if there is none."""
        if all(map(math.isfinite, self.losses)):
            return None
        step = next(at for at, loss in enumerate(self.losses) if not math.isfinite(loss))
        return f"the loss of {self.work.name} is {self.losses[step]} in step {step}"

    @property
    def fell(self) -> bool:
        """Whether the last loss is below the first."""
        return self.losses[-1] < self.losses[0]


def matmul_flops_per_s(sizes: Sizes, device: torch.device) -> float:
    """Returns operations a second of a large bf16 product, the median of several rounds.

    The factors are random: with constant ones a GPU draws less power and clocks a tenth higher.
    """
    side = sizes.product
    left, right = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(sizes.product_repeats):
            torch.mm(left, right, out=out)

    multiply()
    times = [seconds(multiply, device) for _ in range(sizes.product_rounds)]
    return 2.0 * side**3 * sizes.product_repeats / statistics.median(times)


def measure_training(work: SingleStageWorkload, sizes: Sizes, device: torch.device) -> TrainResult:
    """Plans the work, then trains it: two warm-up steps that measure memory, the timed steps, and one recorded step.

    Memory is counted from before the first weight to the end of the second step.
    """
    settings = sizes.optimizer
    micro_batch = work.feed(device)[0]
    sample = Sample(micro_batch, micro_batch)
    profiled_costs = profile(
        work.layers, work.loss, sample, device, settings.precision, lambda m: single_device_update(m, settings)
    )
    profiled = plan_work(profiled_costs, work, settings)
    declared = declared_device(device)
    estimated = plan_work(_estimate(work, micro_batch, declared, settings), work, settings)
    del micro_batch, sample
    empty_cache(device)
    with MemoryTracker(device) as memory_tracker:
        trainer = SingleStageTrainer(work, device, settings)
        losses = [_step(trainer, step) for step in range(WARM_UPS)]
    trains, updates, timed_losses = _time_steps(trainer, sizes.steps)
    actions, last = _record_actions(trainer, WARM_UPS + sizes.steps)
    return TrainResult(
        work, statistics.median(trains), statistics.median(updates), actions, memory_tracker.peak,
        (*losses, *timed_losses, last), profiled, estimated, declared.name,
    )  # fmt: skip


def _time_steps(trainer: SingleStageTrainer, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Returns seconds of training and of updates, and losses."""
    trains, updates, losses = [], [], []
    for step in range(WARM_UPS, WARM_UPS + steps):
        trains.append(seconds(lambda at=step: losses.append(trainer.train(at)), trainer.device))  # type: ignore[misc]
        updates.append(seconds(trainer.update, trainer.device))
    return trains, updates, losses


def _record_actions(trainer: SingleStageTrainer, step: int) -> tuple[dict[str, float], float]:
    """Runs a step and records every action; returns the median seconds of each kind, and the loss."""
    trainer.executor.recorder = recorder = Recorder(trainer.device)
    recorder.begin()
    loss = _step(trainer, step)
    spans = recorder.spans()
    return {kind: statistics.median([s.seconds for s in spans if s.kind == kind] or [0.0]) for kind in "FRB"}, loss


def plan_work(costs: Sequence[LayerCost], work: SingleStageWorkload, settings: OptimizerSettings) -> Prediction:
    """Returns what ``make plan`` predicts for the work as one stage of one replica."""
    pipeline = PipelineSettings(stages=1, micro_batches=work.micro_batches, remat=REMAT)
    parameter_bytes = bytes_per_parameter(settings, replicas=1)
    plan = make_plan(costs, pipeline, parameter_bytes, Machine(UNBOUNDED))
    return Prediction(plan.step_s, plan.cells[0].peak_bytes)


def declared_device(device: torch.device) -> Device:
    """Returns the declared device that matches this GPU's name; for others a device with its own rates."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = [declared for name, declared in DEVICES.items() if name.lower() in properties.name.lower()]
        return known[0] if known else this_device(properties.total_memory)
    return this_device(0)


def _estimate(
    work: SingleStageWorkload, micro_batch: MicroBatch, device: Device, settings: OptimizerSettings
) -> list[LayerCost]:
    inputs = tuple(tensor.detach().cpu().requires_grad_(tensor.requires_grad) for tensor in micro_batch.inputs)
    host = MicroBatch(inputs, tuple(tensor.cpu() for tensor in micro_batch.targets))
    return estimate(work.layers, work.loss, host, device, settings)


def _step(trainer: SingleStageTrainer, step: int) -> float:
    loss = trainer.train(step)
    trainer.update()
    return loss
