"""The seconds and the memory of a step on one device, against its plan from layer costs measured there."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from experiments.base.cluster import Cluster
from launch.backends.processes import run_processes
from models.chunked_loss import set_logits_bytes
from suite.pipeline.planning.devices import DEVICES, GIB, Machine
from suite.pipeline.planning.estimate import CudaDropout, estimate
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import make_plan
from tests.gpu.gradients import Record
from tests.gpu.work import Sizes

STEPS = 8


def check_step(sizes: Sizes, machine: Cluster) -> Record:
    """Measures what a run would be planned with, then its steps, each in a new process."""
    from experiments.translation.runs import t128_6b  # here: a bare checkout lacks packages that these import
    from launch.worker.measure import MeasuredPipeline, measure_layers, measure_steps
    from tests.gpu.peak import measure_peak_bytes

    work, use_gpu, logits_bytes = t128_6b().with_settings(sizes.step), machine.kind == "gpu", machine.logits_bytes
    layers, loss = work.build()
    set_logits_bytes(layers, logits_bytes)
    declared = replace(DEVICES["TPUv3"], is_cuda=use_gpu)
    with CudaDropout() if use_gpu else nullcontext():
        estimated = estimate(layers, loss, work.sample().largest, declared, work.optimizer)
    with tempfile.TemporaryDirectory() as folder:
        given = work, estimated, 1, use_gpu, Path(folder) / "measuring.log", logits_bytes
        (measured,) = run_processes(measure_layers, 1, *given)
    memory = Machine(machine.bytes_per_device)
    plan = make_plan(Problem(measured.costs, work.pipeline, bytes_per_parameter(work.optimizer, replicas=1), memory))
    run = MeasuredPipeline(work, plan.layers_per_cell, plan.schedule_config, use_gpu, logits_bytes)
    (peak_bytes,) = run_processes(measure_peak_bytes, 1, run)
    (steps,) = run_processes(measure_steps, 1, run, STEPS)
    planned_bytes = plan.cells[0].peak_bytes
    return {
        "rows": [
            ["seconds of a step", statistics.median(steps.seconds), plan.step_s],
            ["GiB at the peak", peak_bytes / GIB, planned_bytes / GIB],
        ],
        "faults": [] if steps.applied else ["a loss or a gradient of a step is not finite"],
        "over_plan": over_plan(peak_bytes, planned_bytes),
    }


def over_plan(peak_bytes: int, planned_bytes: int) -> str | None:
    """Returns the fault of a peak above the plan's, as a clause; None if there is none."""
    if peak_bytes <= planned_bytes:
        return None
    return f"a step held {peak_bytes / GIB:.2f} GiB and the plan says {planned_bytes / GIB:.2f}"
