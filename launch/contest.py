"""What the worker processes of a benchmark do: build the contenders, check their gradients, then run them in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from experiments.benchmark import Case, order
from experiments.peers.one_process import WholeModel
from experiments.peers.peer import Contender, Gradients, Runner, Seat
from experiments.peers.work import Work
from launch.engine import GROUP_TIMEOUT
from launch.measure import meet
from launch.worker import log_to
from models.sleeping import awake
from suite.pipeline.allocation import Allocation
from suite.pipeline.recipe import Recipe
from suite.pipeline.topology import Place, make_groups


@dataclass(frozen=True)
class Seen:
    """What one worker saw of one contender."""

    differences: dict[tuple[int, str], float]
    """From one process's gradients, of each parameter it holds, as a share of the largest value."""
    peak: int | None
    rounds: tuple[tuple[float, ...], ...]

    def then(self, later: Seen) -> Seen:
        """Returns both as one: the worse of differences and peaks, the rounds one after the other."""
        keys = self.differences.keys() | later.differences.keys()
        # a gradient that was missing once is as wrong as can be
        worst = {
            key: max(self.differences.get(key, math.inf), later.differences.get(key, math.inf), key=_not_a_number_last)
            for key in keys
        }
        peaks = [peak for peak in (self.peak, later.peak) if peak is not None]
        return Seen(worst, max(peaks, default=None), self.rounds + later.rounds)


def _not_a_number_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def truth(rank: int, world: int, rendezvous: str, work: Work, file: Path, threads: int) -> None:
    """Writes the gradients of one process that has the whole model to a file of tensors, by ``layer.name``."""
    torch.set_num_threads(threads)
    model = WholeModel(work)
    with awake():
        model.step()
    gradients = {_tensor_name(key): value.contiguous() for key, value in model.cell.gradients().items()}
    save_file(gradients, file)


def compete(
    rank: int, world: int, rendezvous: str, case: Case, rounds: int, cells: dict[int, tuple[int, ...]],
    plans: dict[str, tuple[tuple[int, ...], Recipe]], contenders: Sequence[Contender], truth_file: Path,
    progress: Path | None, log: Path,
) -> list[Seen]:  # fmt: skip
    """Runs so many rounds of a case; all workers return what they saw of each contender, in the order given.

    ``progress`` is the file where the first worker says how far it is; None: nobody says anything.
    """
    log_to(log)
    meet(rank, world, rendezvous, threads=1)
    work = case.work
    place = Place(rank, work.stages, work.replicas)
    seat = Seat(place, make_groups(place, GROUP_TIMEOUT), work, cells, plans, *work.share(place.replica))
    say = _speaker(rank, progress)

    begin = perf_counter()
    runners: list[Runner] = []
    checked: list[tuple[dict[tuple[int, str], float], int | None]] = []
    for contender in contenders:
        runner = contender.build(seat)
        checked.append(_check(runner, contender, truth_file))
        runners.append(runner)
    say(f"{len(runners)} contenders built and their gradients compared: {perf_counter() - begin:.1f} s")

    timed: list[list[list[float]]] = [[] for _ in contenders]
    for at in range(rounds):
        begin = perf_counter()
        for which in order(len(runners), at, rounds):
            for _ in range(case.warm_ups):
                _timed(runners[which])
            timed[which].append([_timed(runners[which]) for _ in range(case.steps)])
        say(f"round {at + 1} of {rounds}: {perf_counter() - begin:.1f} s")
    dist.barrier()
    dist.destroy_process_group()
    return [
        Seen(*found, tuple(map(tuple, seconds))) for found, seconds in zip(checked, timed, strict=True)
    ]  # fmt: skip


def _check(runner: Runner, contender: Contender, truth_file: Path) -> tuple[dict[tuple[int, str], float], int | None]:
    """Runs one step, which warms up too, with the allocator watched; returns differences of gradients and the peak."""
    dist.barrier()
    with awake(), Allocation(torch.device("cpu")) as allocation:
        runner.step()
    dist.barrier()
    differences = compare(runner.gradients(), truth_file)
    runner.clear()
    return differences, allocation.peak if contender.peak else None


def compare(gradients: Gradients, truth_file: Path) -> dict[tuple[int, str], float]:
    """Returns of each gradient the largest difference from the true one, over the true one's largest value."""
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


def _speaker(rank: int, progress: Path | None) -> Callable[[str], None]:
    def say(text: str) -> None:
        if rank == 0 and progress is not None:
            with progress.open("a") as file:
                file.write(f"{text}\n")

    return say
