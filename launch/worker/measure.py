"""Measurements in worker processes: costs of layers, or whole steps of a pipeline."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.base.workload import Measurable
from launch.worker.engine import GROUP_TIMEOUT, Engine, assemble
from launch.worker.worker import log_to
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.topology import RankCoord, backend_of
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.memory_tracker import MemoryTracker, keep_freed_memory
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.profile import profile
from suite.pipeline.planning.simulate import Link
from suite.pipeline.runtime.recorder import Recorder
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.timeline import Span
from suite.training.optimizer import single_device_update


def init_process_group(rank: int, world: int, rendezvous: str, threads: int, use_gpu: bool = False) -> torch.device:
    """Joins the default process group; returns this process's device."""
    torch.set_num_threads(threads)
    if use_gpu:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if use_gpu else torch.device("cpu")
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(backend_of(device), init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)
    return device


@dataclass(frozen=True)
class LayerMeasurements:
    """Layer costs on one device, the link between two processes, and the memory of a worker without tensors."""

    costs: tuple[LayerCost, ...]
    link: Link
    process_bytes: int
    load: float = 0.0
    """The machine's one-minute load average before the measurement."""


def measure_layers(
    rank: int, world: int, rendezvous: str, workload: Measurable, threads: int, use_gpu: bool, log_file: Path
) -> LayerMeasurements:
    """Profiles a workload's layers in ``world`` concurrent processes, like the workers of a run.

    The libraries' output goes to ``log_file``.
    """
    log_to(log_file)
    load = os.getloadavg()[0]
    keep_freed_memory()  # as a run's workers do
    device = init_process_group(rank, world, rendezvous, threads, use_gpu)
    process_bytes = _process_bytes(device)
    layers, loss = workload.build()

    def majority(vote: bool) -> bool:
        votes = torch.tensor([int(vote)])
        dist.all_reduce(votes)
        return int(votes) * 2 > world

    settings = workload.optimizer
    costs = profile(
        layers,
        loss,
        workload.sample(),
        device,
        settings.precision,
        lambda m: single_device_update(m, settings),
        majority,
    )
    link = measure_link(rank, max(1, max(cost.boundary_bytes for cost in costs)), device) if world > 1 else Link()
    dist.destroy_process_group()
    return LayerMeasurements(tuple(costs), link, process_bytes, load)


def _process_bytes(device: torch.device) -> int:
    """Returns the memory of this process besides its tensors: on its GPU, or on the host if it has none."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_link(rank: int, size: int, device: torch.device) -> Link:
    """Returns latency and bandwidth between ranks 0 and 1, from messages of 1 byte and of ``size`` bytes."""
    if rank > 1:
        return Link()

    def one_way_s(count: int) -> float:
        message = torch.zeros(count, dtype=torch.uint8, device=device)
        times = []
        for _ in range(15):
            begin = time.perf_counter()
            dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
            dist.recv(message, 1) if rank == 0 else dist.send(message, 0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - begin) / 2)
        return sorted(times)[len(times) // 4]  # low quartile, because other processes only add time

    latency_s, large_s = one_way_s(1), one_way_s(size)
    return Link(latency_s, size / max(large_s - latency_s, 1e-9))


@dataclass(frozen=True)
class Steps:
    """One worker's measurements: seconds and spans of each step, and its peak memory."""

    seconds: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]
    begins: tuple[float, ...]
    peak_bytes: int
    overheads: tuple[float, ...] = ()
    """The fraction of each step that was neither an action nor a wait for a message. It includes waits for sends, which
    occur on a stage that is far ahead."""


def measure_steps(
    rank: int,
    world: int,
    rendezvous: str,
    workload: Measurable,
    cells: Sequence[int],
    schedule_config: ScheduleConfig,
    steps: int,
    threads: int,
    update: bool = True,
    measure_memory: bool = False,
) -> Steps:
    """Measures steps of one replica's pipeline on equal micro-batches, after two warm-up steps.

    With ``measure_memory`` it measures peak memory from the first weight to the end of the second step instead, and
    times no step.
    """
    keep_freed_memory()  # as a run's workers do
    device = init_process_group(rank, world, rendezvous, threads)
    coord = RankCoord(rank, world, 1)
    if not measure_memory:
        engine = _engine(coord, workload, cells, schedule_config, device)
        return _steps(engine, workload, steps, update, coord)
    with MemoryTracker(device) as memory_tracker:
        engine = _engine(coord, workload, cells, schedule_config, device)
        _steps(engine, workload, 0, update, coord)
    return Steps((), (), (), memory_tracker.peak)


def _engine(
    coord: RankCoord, workload: Measurable, cells: Sequence[int], schedule_config: ScheduleConfig, device: torch.device
) -> Engine:
    layers, loss = workload.build()
    ranges = cell_ranges(cells, len(layers))
    return assemble(coord, layers, loss, ranges, device, schedule_config, workload.optimizer, seed=0)


WARM_UPS = 2


def _steps(engine: Engine, workload: Measurable, steps: int, update: bool, coord: RankCoord) -> Steps:
    sample, count = workload.sample().typical, workload.pipeline.micro_batches
    batch = MiniBatch([sample.inputs] * count, [sample.targets] * count, float(count))
    own_batch = batch if coord.is_first or coord.is_last else None
    recorder = Recorder(engine.executor.stage.device)
    engine.executor.recorder = recorder
    seconds, spans, begins, overheads = [], [], [], []
    for step in range(WARM_UPS + steps):
        dist.barrier()
        begin = recorder.begin()
        sums = engine.executor.train(own_batch, step)
        elapsed_s, waited_s = time.monotonic() - begin, recorder.waited
        busy_s = sum(span.seconds for span in recorder.spans())
        overheads.append((elapsed_s - busy_s - waited_s) / elapsed_s)
        if update:
            engine.optimizer.update(sums, step, recorder)
        else:
            dist.barrier()
        seconds.append(time.monotonic() - begin)
        spans.append(tuple(recorder.spans()))
        begins.append(begin)
    timed = slice(WARM_UPS, None)
    return Steps(tuple(seconds[timed]), tuple(spans[timed]), tuple(begins[timed]), 0, tuple(overheads[timed]))
