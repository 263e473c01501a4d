"""The parts that train a workload on one device, beside their plan."""

from __future__ import annotations

import gc
import math
import statistics
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from launch.gpu_check.single_stage import SingleStageTrainer, empty_cache, seconds
from launch.gpu_check.two_stages import DEADLINE_S
from launch.gpu_check.work import REMAT, Sizes, Workload
from suite.pipeline.planning.devices import GIB, Machine
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.memory_tracker import MemoryTracker
from suite.pipeline.planning.plan import Plan, make_plan
from suite.pipeline.planning.profile import Sample, profile
from suite.pipeline.runtime.communication_errors import explain
from suite.settings import PipelineSettings
from suite.training.stage_optimizer import single_device_update

Record = dict[str, Any]

WARM_UPS = 2

UNBOUNDED = 1 << 62
"""A memory limit in bytes that no plan exceeds."""

LONGEST_REASON = 300


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


def measure_training(work: Workload, sizes: Sizes, device: torch.device) -> Record:
    """Plans the work from measured layer costs, then trains it; the record says what is measured and what computed.

    Memory is counted from before the first weight to the end of the second step. Utilisation is relative to the higher
    of two rates of a large product, before and after, so that it is never overstated.
    """
    plan = plan_work(work, sizes, device)
    empty_cache(device)
    first_rate = matmul_flops_per_s(sizes, device)
    with MemoryTracker(device) as memory_tracker:
        trainer = SingleStageTrainer(work, device, sizes.optimizer)
        losses = [_step(trainer, step) for step in range(WARM_UPS)]
    trains, updates = [], []
    for step in range(WARM_UPS, WARM_UPS + sizes.steps):
        trains.append(seconds(lambda at=step: losses.append(trainer.train(at)), device))  # type: ignore[misc]
        updates.append(seconds(trainer.update, device))
    rate = max(first_rate, matmul_flops_per_s(sizes, device))
    step_s = statistics.median(trains) + statistics.median(updates)
    flops, planned = work.flops(), plan.cells[0].peak_bytes
    bad = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), None)
    return {
        "name": work.name, "parameters": work.parameters, "micro_batches": work.micro_batches, "rows": work.rows,
        "time": work.time, "loss_fell": losses[-1] < losses[0],
        "measured": {
            "step_s": step_s, "update_s": statistics.median(updates), "tokens_per_s": work.tokens / step_s,
            "peak_bytes": memory_tracker.peak, "losses": losses, "product_flops_per_s": rate,
        },
        "planned_from_measured_costs": {"step_s": plan.step_s, "peak_bytes": planned},
        "computed": {
            "model_flops": flops.model_per_unit, "hardware_flops": flops.hardware_per_unit,
            "mfu": flops.model_per_unit / step_s / rate, "hfu": flops.hardware_per_unit / step_s / rate,
            "peak_of_planned": memory_tracker.peak / planned,
        },
        "over_plan": over_plan(work.name, memory_tracker.peak, planned),
        "faults": [] if bad is None else [f"the loss of {work.name} is {losses[bad]} in step {bad}"],
    }  # fmt: skip


def over_plan(name: str, peak_bytes: int, planned_bytes: int) -> str | None:
    """Returns the fault of a peak above the plan's, as a clause; None if there is none."""
    if peak_bytes <= planned_bytes:
        return None
    return f"{name} held {peak_bytes / GIB:.2f} GiB and the plan says {planned_bytes / GIB:.2f}"


def plan_work(work: Workload, sizes: Sizes, device: torch.device) -> Plan:
    """Returns what ``make plan`` plans for the work as one stage of one replica, from costs measured here."""
    micro_batch, settings = work.feed(device), sizes.optimizer
    sample = Sample(micro_batch, micro_batch)
    costs = profile(
        work.layers, work.loss, sample, device, settings.precision, lambda m: single_device_update(m, settings)
    )
    pipeline = PipelineSettings(stages=1, micro_batches=work.micro_batches, remat=REMAT)
    return make_plan(costs, pipeline, bytes_per_parameter(settings, replicas=1), Machine(UNBOUNDED))


def reason(error: Exception) -> str:
    """Returns an error as one line: what it means for a process that communicates, or its own text."""
    if (meaning := explain(error, "the other process", DEADLINE_S)) is not error:
        return str(meaning)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # that of a spawned process is its traceback
    return f"{type(error).__name__}: {lines[-1 if isinstance(error, ProcessRaisedException) else 0]}"[:LONGEST_REASON]


def free(device: torch.device) -> str | None:
    """Frees what a part left: frames of an error hold its graphs. Returns why a GPU cannot, as after an illegal memory
    access."""
    gc.collect()
    try:
        empty_cache(device)
    except RuntimeError as error:
        return reason(error)
    return None


def _step(trainer: SingleStageTrainer, step: int) -> float:
    loss = trainer.train(step)
    trainer.update()
    return loss
