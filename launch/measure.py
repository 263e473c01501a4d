"""What worker processes do to measure: the cost of layers, or whole steps of a pipeline. Results go back as values."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.workload import Measurable
from launch.engine import GROUP_TIMEOUT, Engine, assemble
from launch.worker import log_to
from suite.pipeline.allocation import Allocation, keep_freed_memory
from suite.pipeline.costs import LayerCost
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.partition import cell_ranges
from suite.pipeline.profile import profile
from suite.pipeline.recipe import Recipe
from suite.pipeline.recorder import Recorder
from suite.pipeline.simulate import Link
from suite.pipeline.timeline import Span
from suite.pipeline.topology import Place, backend_of
from suite.training.optimizer import lone_update


def meet(rank: int, world: int, rendezvous: str, threads: int, use_gpu: bool = False) -> torch.device:
    """Joins the other processes and returns this one's device."""
    torch.set_num_threads(threads)
    if use_gpu:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if use_gpu else torch.device("cpu")
    span = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(backend_of(device), init_method=rendezvous, rank=rank, world_size=world, timeout=span)
    return device


@dataclass(frozen=True)
class Measured:
    """Layer costs on one device, the link between two processes, and the bytes of a worker that holds nothing."""

    costs: tuple[LayerCost, ...]
    link: Link
    process: int
    load: float = 0.0
    """The machine's load average of the minute before."""


def measure_layers(
    rank: int, world: int, rendezvous: str, workload: Measurable, threads: int, use_gpu: bool, log: Path
) -> Measured:
    """Profiles a workload's layers in ``world`` processes at once, as so many workers will compute at once.

    What libraries print goes to the file ``log``.
    """
    log_to(log)
    load = os.getloadavg()[0]
    keep_freed_memory()  # as a run's workers do
    device = meet(rank, world, rendezvous, threads, use_gpu)
    standing = _standing(device)
    layers, loss = workload.build()

    def together(wish: bool) -> bool:
        vote = torch.tensor([int(wish)])
        dist.all_reduce(vote)
        return int(vote) * 2 > world

    settings = workload.optimizer
    costs = profile(
        layers, loss, workload.sample(), device, settings.precision, lambda m: lone_update(m, settings), together
    )
    link = measure_link(rank, max(1, max(cost.boundary for cost in costs)), device) if world > 1 else Link()
    dist.destroy_process_group()
    return Measured(tuple(costs), link, standing, load)


def _standing(device: torch.device) -> int:
    """Returns the bytes a worker takes beside its tensors: on a GPU of the device, else of the host."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_link(rank: int, size: int, device: torch.device) -> Link:
    """Returns latency and bandwidth between ranks 0 and 1, from messages of 1 byte and of ``size`` bytes."""
    if rank > 1:
        return Link()

    def hop(count: int) -> float:
        message = torch.zeros(count, dtype=torch.uint8, device=device)
        times = []
        for _ in range(15):
            begin = time.perf_counter()
            dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
            dist.recv(message, 1) if rank == 0 else dist.send(message, 0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - begin) / 2)
        return sorted(times)[len(times) // 4]  # what others do on the machine only ever adds

    latency, large = hop(1), hop(size)
    return Link(latency, size / max(large - latency, 1e-9))


@dataclass(frozen=True)
class Steps:
    """What one worker saw: seconds of each step, the spans of each, and the most bytes it ever held."""

    seconds: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]
    begins: tuple[float, ...]
    peak_bytes: int
    overheads: tuple[float, ...] = ()
    """The share of each step that was neither an action nor waiting for a message to come; waiting for one to leave, as
    a stage does that is far ahead, is among it."""


def measure_steps(
    rank: int, world: int, rendezvous: str, workload: Measurable, cells: Sequence[int], recipe: Recipe, steps: int,
    threads: int, update: bool = True, weigh: bool = False,
) -> Steps:  # fmt: skip
    """Runs steps of one replica's pipeline on equal micro-batches, the first two not counted.

    With ``weigh`` the allocator is watched from the first weight to the end of the second step, and no step is timed.
    """
    keep_freed_memory()  # as a run's workers do
    device = meet(rank, world, rendezvous, threads)
    place = Place(rank, world, 1)
    if not weigh:
        engine = _engine(place, workload, cells, recipe, device)
        return _steps(engine, workload, steps, update, place)
    with Allocation(device) as allocation:
        engine = _engine(place, workload, cells, recipe, device)
        _steps(engine, workload, 0, update, place)
    return Steps((), (), (), allocation.peak)


def _engine(place: Place, workload: Measurable, cells: Sequence[int], recipe: Recipe, device: torch.device) -> Engine:
    layers, loss = workload.build()
    ranges = cell_ranges(cells, len(layers))
    return assemble(place, layers, loss, ranges, device, recipe, workload.optimizer, seed=0)


WARM_UPS = 2


def _steps(engine: Engine, workload: Measurable, steps: int, update: bool, place: Place) -> Steps:
    one, count = workload.sample().typical, workload.pipeline.micro_batches
    batch = MiniBatch([one.inputs] * count, [one.targets] * count, float(count))
    needed = batch if place.first or place.last else None
    recorder = Recorder(engine.executor.stage.device)
    engine.executor.recorder = recorder
    seconds, spans, begins, overheads = [], [], [], []
    for step in range(WARM_UPS + steps):
        dist.barrier()
        begin = recorder.begin()
        sums = engine.executor.train(needed, step)
        walked, waited = time.monotonic() - begin, recorder.waited
        busy = sum(span.seconds for span in recorder.spans())
        overheads.append((walked - busy - waited) / walked)
        if update:
            engine.optimizer.update(sums, step, recorder)
        else:
            dist.barrier()
        seconds.append(time.monotonic() - begin)
        spans.append(tuple(recorder.spans()))
        begins.append(begin)
    counted = slice(WARM_UPS, None)
    return Steps(tuple(seconds[counted]), tuple(spans[counted]), tuple(begins[counted]), 0, tuple(overheads[counted]))
