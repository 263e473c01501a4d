"""What a worker process of a benchmark does: it builds the entrants, checks their gradients, then times their turns."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from experiments.benchmark.peers.one_process import WholeModel
from experiments.benchmark.peers.peer import BenchContext, Entrant, Gradients, Runner
from experiments.benchmark.peers.workload import BenchWorkload
from launch.benchmarks.entrant_processes import DEADLINE_S, END, BenchInputs, Observation, turn_key
from launch.worker.distributed import GROUP_TIMEOUT_S, init_process_group
from launch.worker.log_file import log_to
from models.synthetic import no_sleep
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.planning.memory_tracker import MemoryTracker


def reference_gradients(rank: int, world: int, rendezvous: str, work: BenchWorkload, file: Path, threads: int) -> None:
    """Writes the gradients of a single process with the whole model to a file, by ``layer.name``."""
    torch.set_num_threads(threads)
    model = WholeModel(work)
    with no_sleep():
        model.step()
    gradients = {tensor_name(*key): value.contiguous() for key, value in model.gradients().items()}
    save_file(gradients, file)


def serve(
    rank: int, world: int, rendezvous: str, inputs: BenchInputs, entrants: Sequence[Entrant], port: int, group: int
) -> None:
    """Builds the entrants, checks their gradients, and runs turns until told to end.

    The store at ``port`` is that of ``launch.benchmarks.entrant_processes``: it holds whose turn it is, and takes the
    seconds.
    """
    log_to(inputs.log)
    init_process_group(rank, world, rendezvous, threads=1)
    case, work = inputs.case, inputs.case.work
    coord = RankCoord(rank, work.stages, work.replicas)
    groups = make_groups(coord, GROUP_TIMEOUT_S)
    context = BenchContext(coord, groups, work, inputs.cells, inputs.plans, *work.share(coord.replica))
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))

    runners: list[Runner] = []
    observed: list[Observation] = []
    for entrant in entrants:
        runners.append(entrant.build(context))
        observed.append(_check(runners[-1], inputs.truths[entrant.threads_of(work)]))
    store.set(f"{group}/built/{rank}", json.dumps([asdict(each) for each in observed]))
    for turn in count():
        key = turn_key(group, turn)
        whose = store.get(key).decode()  # waits without computing
        if whose == END:
            break
        seconds = [_timed(runners[int(whose)]) for _ in range(case.steps)]
        store.set(f"{key}/{rank}", json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _check(runner: Runner, truth_file: Path) -> Observation:
    """Runs one step, which also warms up."""
    dist.barrier()
    with no_sleep(), MemoryTracker(torch.device("cpu")) as memory_tracker:
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
