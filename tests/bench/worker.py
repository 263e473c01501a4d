"""The worker processes of a benchmark case, which stay alive and run one entrant's turn at a time.

    A's processes   build, first step   wait, without computing   steps   wait ...
    B's processes                       build, first step         wait    steps ...

In its first turn an entrant is built, and its gradients are checked. Why not start processes for each turn: that takes
longer than the turn. Why not one set of processes for all: with twenty other entrants in the same memory, an entrant
that computes is up to a tenth slower (measured).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from experiments.tables import sleeping
from launch.backends.network_interface import rendezvous_store
from launch.backends.processes import run_processes
from launch.worker.distributed import GROUP_TIMEOUT_S, init_process_group
from launch.worker.log_file import log_to
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.planning.memory_tracker import tracked_memory
from suite.pipeline.schedule.config import ScheduleConfig
from tests.bench.cases import Case
from tests.bench.peers.cell import WholeModel
from tests.bench.peers.peer import BenchContext, Entrant, Gradients, Runner
from tests.bench.peers.workload import BenchWorkload

DEADLINE_S = 3600.0
"""Longest life of a case's processes."""

_POLL_S = 0.05
"""How often the parent asks whose turn it is, and whether the workers still live."""


@dataclass(frozen=True)
class BenchInputs:
    case: Case
    turns: tuple[str, ...]
    """Whose turn it is, in order. In its first one an entrant is built and does its first step."""
    cells: dict[int, tuple[int, ...]]
    """Layers per cell, by the number of cells."""
    plans: dict[str, tuple[tuple[int, ...], ScheduleConfig]]
    """Cells and schedule of the planned entrants, by name."""
    truths: dict[int, Path]
    """The gradients of one process, by its number of threads: sums of another order can turn a ReLU on or off."""
    log: Path


@dataclass(frozen=True)
class Observation:
    """What one worker found of an entrant."""

    differences: dict[str, float]
    """Largest difference from the reference gradient for each parameter it holds, relative to its largest value."""
    peak: int
    """Peak bytes that the first step allocated."""
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each step, by round."""


def no_sleep() -> AbstractContextManager[Any]:
    """Returns a context in which no ``SyntheticLayer`` of this process sleeps, for steps that are not timed."""
    return mock.patch.object(sleeping, "time")


def reference_gradients(rank: int, world: int, rendezvous: str, work: BenchWorkload, file: Path, threads: int) -> None:
    """Writes the gradients of a single process with the whole model to a file, by ``layer.name``."""
    torch.set_num_threads(threads)
    model = WholeModel(work)
    with no_sleep():
        model.step()
    gradients = {tensor_name(*key): value.contiguous() for key, value in model.gradients().items()}
    save_file(gradients, file)


def run_turns(inputs: BenchInputs, entrants: Sequence[Entrant], console: Console) -> dict[str, list[Observation]]:
    """Runs all turns; returns what each worker found, by entrant. Entrants that compute get processes of their own, the
    others share theirs. Raises what ended the workers."""
    case = inputs.case
    groups = [[one] for one in entrants] if case.own_processes else [list(entrants)]
    workers = case.work.stages * case.work.replicas
    store = rendezvous_store("127.0.0.1")
    store.set("0", "")
    ended = threading.Event()
    running: list[Future[list[Any]]] = []
    with ThreadPoolExecutor(len(groups), "entrants") as threads:
        try:
            for number in range(len(inputs.turns)):
                if number < len(groups):  # after the turn before: each has the machine to itself in its first step
                    running.append(
                        threads.submit(
                            run_processes, serve, workers, inputs, groups[number], store.port, deadline_s=DEADLINE_S,
                            should_stop=ended.is_set,
                        )
                    )  # fmt: skip
                while not store.check([str(number + 1)]):  # a wait with a time limit would print a warning each time
                    for future in running:
                        if future.done():
                            future.result()
                    time.sleep(_POLL_S)
                if number >= len(entrants) and (number + 1) % len(entrants) == 0:
                    console.print(f"{case.title}: round {(number + 1) // len(entrants) - 1} of {case.rounds}")
            found = [future.result() for future in running]
        except BaseException:
            ended.set()
            raise
    return {
        entrant.name: [of_worker[entrant.name] for of_worker in of_group]
        for group, of_group in zip(groups, found, strict=True)
        for entrant in group
    }


def serve(
    rank: int, world: int, rendezvous: str, inputs: BenchInputs, entrants: Sequence[Entrant], port: int
) -> dict[str, Observation]:
    """Runs all turns of these entrants; returns what this worker found of each.

    In the store at ``port`` a turn's number appears when it may begin.
    """
    log_to(inputs.log)
    init_process_group(rank, world, rendezvous, threads=1)
    case, work = inputs.case, inputs.case.work
    coord = RankCoord(rank, work.stages, work.replicas)
    groups = make_groups(coord, GROUP_TIMEOUT_S)
    context = BenchContext(coord, groups, work, inputs.cells, inputs.plans, *work.share(coord.replica))
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))

    own = {entrant.name: entrant for entrant in entrants}
    runners: dict[str, Runner] = {}
    found: dict[str, Observation] = {}
    for number, name in enumerate(inputs.turns):
        if name not in own:
            continue
        store.get(str(number))  # waits without computing
        if name not in runners:
            runners[name] = own[name].build(context)
            found[name] = _check(runners[name], inputs.truths[own[name].threads_of(work)])
        else:
            found[name].rounds.append([_timed(runners[name]) for _ in range(case.steps)])
        dist.barrier()
        if rank == 0:
            store.set(str(number + 1), "")
    dist.barrier()
    dist.destroy_process_group()
    return found


def _check(runner: Runner, truth_file: Path) -> Observation:
    """Runs one step, which also warms up."""
    dist.barrier()
    with no_sleep(), tracked_memory(torch.device("cpu")) as memory_tracker:
        runner.step()
    dist.barrier()
    differences = compare(runner.gradients(), truth_file)
    runner.clear()
    return Observation(differences, memory_tracker.peak)


def compare(gradients: Gradients, truth_file: Path) -> dict[str, float]:
    """Returns each gradient's largest difference from the reference, relative to the reference's largest value."""
    found = {}
    with safe_open(truth_file, "pt") as true:
        for (layer, name), gradient in gradients.items():
            key = tensor_name(layer, name)
            expected = true.get_tensor(key)
            if expected.shape != gradient.shape:
                found[key] = math.inf
                continue
            difference, scale = float((gradient - expected).abs().max()), float(expected.abs().max())
            found[key] = difference / scale if scale else difference
    return found


def _timed(runner: Runner) -> float:
    dist.barrier()
    begin = perf_counter()
    runner.step()
    seconds = perf_counter() - begin
    dist.barrier()
    runner.clear()
    return seconds


def tensor_name(layer: int, name: str) -> str:
    """Returns a parameter's name in the file of reference gradients."""
    return f"{layer}.{name}"
