"""Measurements in worker processes: costs of layers, or whole steps of a pipeline."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from experiments.base.workload import Measurable
from launch.worker.build import PartitionedModel, make_executor, make_stage_optimizer
from launch.worker.distributed import busy_link, init_process_group, one_way_s, shared_gpu
from launch.worker.log_file import log_to
from models.chunked_loss import CPU_LOGITS_BYTES, set_logits_bytes
from suite.device import is_host, module_of, synchronize
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.measure import measure
from suite.pipeline.planning.memory_tracker import keep_freed_memory
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.simulate import Link
from suite.pipeline.schedule.config import ScheduleConfig
from suite.training.stage_optimizer import single_device_update


@dataclass(frozen=True)
class LayerMeasurements:
    """Layer costs on one device, the link between two processes, and the memory of a worker without tensors."""

    costs: tuple[LayerCost, ...]
    link: Link
    process_bytes: int
    load: float = 0.0
    """The machine's one-minute load average before the measurement."""


def measure_layers(
    rank: int,
    world: int,
    rendezvous: str,
    workload: Measurable,
    estimated: Sequence[LayerCost],
    threads: int,
    use_gpu: bool,
    log_file: Path,
    logits_bytes: int = CPU_LOGITS_BYTES,
    memory_bytes: float = math.inf,
) -> LayerMeasurements:
    """Measures a workload's layers, of ``estimated`` costs, in ``world`` concurrent processes, like the workers of a
    run. Each may take ``memory_bytes``.

    The libraries' output goes to ``log_file``.
    """
    log_to(log_file)
    load = os.getloadavg()[0]
    keep_freed_memory()  # as a run's workers do
    device = init_process_group(rank, world, rendezvous, threads, rank if use_gpu else None)
    sample = workload.sample()
    memory = psutil.Process().memory_info()
    anonymous_bytes = memory.rss - memory.shared  # with the open data, which a run's workers have too
    layers, loss = workload.build()
    set_logits_bytes(layers, logits_bytes)

    def majority(vote: bool) -> bool:
        votes = torch.tensor([int(vote)])
        dist.all_reduce(votes)
        return int(votes) * 2 > world

    settings = workload.optimizer
    update = partial(single_device_update, settings=settings)
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    costs = measure(estimated, layers, loss, sample, device, settings.precision, update, majority, memory_bytes)
    computes = majority(time.process_time() - cpu_s > (time.perf_counter() - begin_s) / 4)
    process_bytes = _process_bytes(device, anonymous_bytes)
    size = max(1, max(cost.boundary_bytes for cost in costs))
    link = measure_link(rank, size, device, computes) if world > 1 else Link()
    dist.destroy_process_group()
    return LayerMeasurements(tuple(costs), link, process_bytes, load)


def _process_bytes(device: torch.device, anonymous_bytes: int) -> int:
    """Returns the memory of this process besides its tensors: on its GPU, or on the host if it has none. On a GPU that
    includes the workspaces of libraries such as cuBLAS, the only tensors left here; there is no NCCL communicator yet,
    which a plan adds (``suite.pipeline.planning.devices``).

    On the host these are ``anonymous_bytes``, counted before there were tensors, and the pages of files: those of the
    libraries' code become resident only when it runs.
    """
    if not is_host(device):
        gc.collect()
        free, total = module_of(device).mem_get_info(device)
        unused = module_of(device).memory_reserved(device) - module_of(device).memory_allocated(device)
        return max(0, int(total - free - unused))
    return anonymous_bytes + int(psutil.Process().memory_info().shared)


def measure_link(rank: int, size: int, device: torch.device, computes: bool = False) -> Link:
    """Returns latency and bandwidth between ranks 0 and 1, from messages of 1 byte and of ``size`` bytes. Where a CPU
    ``computes`` and does not sleep or wait, it is that of busy ranks, and messages have an overhead."""
    if rank > 1:
        return Link()
    idle_s, large_s = one_way_s(1 - rank, 1, device), one_way_s(1 - rank, size, device)
    idle = Link(idle_s, size / max(large_s - idle_s, 1e-9))
    return busy_link(1 - rank, idle, size) if computes and is_host(device) else idle


@dataclass(frozen=True)
class Steps:
    """One worker's measurements of each step."""

    seconds: tuple[float, ...]
    applied: bool = True
    """Whether all losses and gradients were finite, so that every update was applied."""


def slowest_s(steps: Sequence[Steps]) -> list[float]:
    """Returns the seconds of each step on the slowest of the workers."""
    return [max(column) for column in zip(*(worker.seconds for worker in steps), strict=True)]


WARM_UPS = 2


@dataclass(frozen=True)
class MeasuredPipeline:
    """A pipeline of one replica, with a process for each stage."""

    workload: Measurable
    cells: Sequence[int]
    """Layers of each."""
    schedule_config: ScheduleConfig
    use_gpu: bool = False
    logits_bytes: int = CPU_LOGITS_BYTES


def measure_steps(
    rank: int, world: int, rendezvous: str, pipeline: MeasuredPipeline, steps: int, update: bool = True
) -> Steps:
    """Measures steps on equal micro-batches, after two warm-up steps."""
    return run_steps(join(rank, world, rendezvous, pipeline), pipeline, steps, update)


def join(rank: int, world: int, rendezvous: str, pipeline: MeasuredPipeline) -> torch.device:
    """Joins the other stages' processes; returns this one's device."""
    keep_freed_memory()  # as a run's workers do
    return init_process_group(rank, world, rendezvous, 1, shared_gpu(rank, world) if pipeline.use_gpu else None)


def run_steps(device: torch.device, pipeline: MeasuredPipeline, steps: int, update: bool = True) -> Steps:
    """Builds this process's stage and runs two warm-up steps and ``steps`` more."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    workload, schedule_config = pipeline.workload, pipeline.schedule_config
    coord = RankCoord(rank, stages, 1, schedule_config.cell_to_stage(stages))
    layers, loss = workload.build()
    set_logits_bytes(layers, pipeline.logits_bytes)
    model = PartitionedModel(layers, loss, cell_ranges(pipeline.cells, len(layers)), schedule_config)
    executor, groups = make_executor(coord, model, device, workload.optimizer.precision, seed=0)
    optimizer = make_stage_optimizer(executor, groups, model, workload.optimizer)
    sample, count = workload.sample().typical, workload.pipeline.micro_batches
    batch = ReplicaBatch([sample.inputs] * count, [sample.targets] * count, float(count))
    own_batch = batch if coord.is_first or coord.has_loss else None
    seconds, applied = [], True
    for step in range(WARM_UPS + steps):
        dist.barrier()
        begin = time.monotonic()
        sums = executor.train(own_batch, step)
        if update:
            applied &= optimizer.update(sums, step).applied
        else:
            dist.barrier()
        synchronize(device)
        seconds.append(time.monotonic() - begin)
    return Steps(tuple(seconds[WARM_UPS:]), applied)
