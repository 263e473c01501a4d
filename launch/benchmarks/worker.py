"""The worker processes of a benchmark: they build the entrants, check their gradients, then time them in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from experiments.benchmark.cases import order
from experiments.benchmark.peers.one_process import WholeModel
from experiments.benchmark.peers.peer import BenchContext, Entrant, Gradients, Runner
from experiments.benchmark.peers.workload import BenchWorkload
from launch.worker.distributed import GROUP_TIMEOUT_S, init_process_group
from launch.worker.worker import log_to
from models.synthetic import no_sleep
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.planning.memory_tracker import MemoryTracker

if TYPE_CHECKING:
    from launch.benchmarks.bench import BenchInputs


@dataclass(frozen=True)
class Observation:
    """One worker's measurements of one entrant."""

    differences: dict[tuple[int, str], float]
    """Largest difference from the reference gradient for each parameter it holds, relative to its largest value."""
    peak: int | None
    rounds: tuple[tuple[float, ...], ...]

    def then(self, later: Observation) -> Observation:
        """Merges two observations: the larger differences and peaks, and all rounds."""
        keys = self.differences.keys() | later.differences.keys()
        # a gradient that is missing once counts as infinitely wrong
        worst = {
            key: max(self.differences.get(key, math.inf), later.differences.get(key, math.inf), key=_nan_last)
            for key in keys
        }
        peaks = [peak for peak in (self.peak, later.peak) if peak is not None]
        return Observation(worst, max(peaks, default=None), self.rounds + later.rounds)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def reference_gradients(rank: int, world: int, rendezvous: str, work: BenchWorkload, file: Path, threads: int) -> None:
    """Writes the gradients of a single process with the whole model to a file, by ``layer.name``."""
    torch.set_num_threads(threads)
    model = WholeModel(work)
    with no_sleep():
        model.step()
    gradients = {_tensor_name(key): value.contiguous() for key, value in model.gradients().items()}
    save_file(gradients, file)


def run_entrants(
    rank: int, world: int, rendezvous: str, inputs: BenchInputs, entrants: Sequence[Entrant], rounds: int,
    progress: Path | None,
) -> list[Observation]:  # fmt: skip
    """Runs ``rounds`` rounds of a case; returns this worker's observation of each entrant, in order.

    The first worker writes progress lines to the file ``progress``, unless it is None.
    """
    log_to(inputs.log)
    init_process_group(rank, world, rendezvous, threads=1)
    case, work = inputs.case, inputs.case.work
    coord = RankCoord(rank, work.stages, work.replicas)
    groups = make_groups(coord, GROUP_TIMEOUT_S)
    context = BenchContext(coord, groups, work, inputs.cells, inputs.plans, *work.share(coord.replica))
    log = _progress_logger(rank, progress)

    begin = perf_counter()
    runners: list[Runner] = []
    checked: list[tuple[dict[tuple[int, str], float], int | None]] = []
    for entrant in entrants:
        runner = entrant.build(context)
        checked.append(_check(runner, entrant, inputs.truth))
        runners.append(runner)
    log(f"{len(runners)} entrants built and their gradients compared: {perf_counter() - begin:.1f} s")

    timed: list[list[list[float]]] = [[] for _ in entrants]
    for at in range(rounds):
        begin = perf_counter()
        for which in order(len(runners), at, rounds):
            for _ in range(case.warm_ups):
                _timed(runners[which])
            timed[which].append([_timed(runners[which]) for _ in range(case.steps)])
        log(f"round {at + 1} of {rounds}: {perf_counter() - begin:.1f} s")
    dist.barrier()
    dist.destroy_process_group()
    return [
        Observation(*found, tuple(map(tuple, seconds))) for found, seconds in zip(checked, timed, strict=True)
    ]  # fmt: skip


def _check(runner: Runner, entrant: Entrant, truth_file: Path) -> tuple[dict[tuple[int, str], float], int | None]:
    """Runs one step, which also warms up; returns the differences of gradients and the peak memory."""
    dist.barrier()
    with no_sleep(), MemoryTracker(torch.device("cpu")) as memory_tracker:
        runner.step()
    dist.barrier()
    differences = compare(runner.gradients(), truth_file)
    runner.clear()
    return differences, memory_tracker.peak if entrant.peak else None


def compare(gradients: Gradients, truth_file: Path) -> dict[tuple[int, str], float]:
    """Returns each gradient's largest difference from the reference, relative to the reference's largest value."""
    found = {}
    with safe_open(truth_file, "pt") as true:
        for key, gradient in gradients.items():
            expected = true.get_tensor(_tensor_name(key))
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


def _tensor_name(key: tuple[int, str]) -> str:
    return f"{key[0]}.{key[1]}"


def _progress_logger(rank: int, progress: Path | None) -> Callable[[str], None]:
    def log(text: str) -> None:
        if rank == 0 and progress is not None:
            with progress.open("a") as file:
                file.write(f"{text}\n")

    return log
