"""A trained run's model at work: its newest whole checkpoint at K stages, each in a process of this machine."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from experiments.experiment import Experiment
from experiments.registry import read_experiment
from experiments.text_experiment import TranslationExperiment
from launch.checkpoints import place_of
from launch.devices import this_machine
from launch.engine import GROUP_TIMEOUT
from launch.error_log import log_error
from launch.limits import cores
from launch.runs import RunFolder
from launch.spawn import run_processes
from suite.data.tokenizer import BEGIN_ID, END_ID, PAD_ID
from suite.errors import CheckpointError, SettingError
from suite.evaluation.beam import LENGTH_PENALTY, SIZE, Beam
from suite.evaluation.grouping import grouped, rectangle
from suite.pipeline.decode import Decoder
from suite.pipeline.incremental import Part, entry
from suite.pipeline.layers import count_parameters
from suite.pipeline.partition import cell_ranges, partition
from suite.pipeline.stage import Stage
from suite.pipeline.topology import Place, backend_of, make_groups
from suite.training import checkpoint
from suite.training.recurring import Recurring

PERIOD = 1.0
"""Seconds between two looks at how far the workers are."""


@dataclass(frozen=True)
class Task:
    """What workers are told."""

    run: RunFolder
    sources: Sequence[Sequence[int]]
    """Marks included."""
    beam: int
    length_penalty: float
    stages: int
    progress: Path
    """A line of JSON for each sentence that is done: which one, and its tokens."""

    @property
    def use_gpu(self) -> bool:
        """Whether each worker has a GPU."""
        return this_machine().kind == "gpu"


@dataclass(frozen=True)
class Written:
    """What a model wrote."""

    tokens: list[list[int]]
    """Of each source, without marks."""
    step: int
    """Of the checkpoint."""
    seconds: float
    """From the first token to the last; loading the model comes before."""


def text_run(run: RunFolder) -> TranslationExperiment:
    """Returns the experiment of a run that can translate. Raises SettingError for one on images."""
    experiment = read_experiment(run.experiment.read_text())
    if not isinstance(experiment, TranslationExperiment):
        raise SettingError(f"run {run.path} was trained on images and translates nothing; take a run on text")
    return experiment


def stages_of(experiment: Experiment, asked: int | None) -> int:
    """Returns K: as asked for, or the fewest whose devices hold the weights, each with half of its memory; no more than
    this machine has. Every stage more costs messages for each token.

    Raises SettingError for more stages than layers, or than GPUs.
    """
    machine = this_machine()
    stages = asked
    if stages is None:
        weights = 4 * count_parameters(experiment.build()[0])
        stages = min(machine.devices, experiment.list_length, -(-2 * weights // machine.bytes_per_device))
    if not 1 <= stages <= experiment.list_length:
        raise SettingError(f"stages is {stages}, the model has {experiment.list_length} layers; use 1 to as many")
    if machine.kind == "gpu" and stages > machine.devices:
        raise SettingError(f"stages is {stages}, there are {machine.devices} GPUs; use 1 to as many")
    return stages


def decode(
    run: RunFolder, sources: Sequence[Sequence[int]], stages: int, console: Console, beam: int = SIZE,
    length_penalty: float = LENGTH_PENALTY, heard: Callable[[int, list[int]], None] | None = None,
) -> Written:  # fmt: skip
    """Translates sources, each ``<2xx> ... </s>``, by the run's newest whole checkpoint.

    ``heard`` gets the number and the tokens of each source as they are done; without it, how many are done is printed.

    Raises CheckpointError when there is none, and what stages raise that wait for another too long.
    """
    with TemporaryDirectory() as folder:
        task = Task(run, sources, beam, length_penalty, stages, Path(folder) / "progress")
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // stages))
        with _watched(task, heard or _counted(len(sources), console)):
            results = run_processes(_work, stages, task, deadline_s=7 * 86400.0)
            written: Written = results[-1][0]
    for line in dict.fromkeys(line for _, heard in results for line in heard):
        console.print(line)
    return written


def _work(rank: int, world: int, rendezvous: str, task: Task) -> tuple[Written | None, list[str]]:
    """One stage; the last one returns what was written, the first what is wrong with checkpoints."""
    experiment, place = text_run(task.run), Place(rank, world, 1)
    torch.set_num_threads(experiment.train.threads or max(1, cores() // world))
    if task.use_gpu:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if task.use_gpu else torch.device("cpu")
    span = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(backend_of(device), init_method=rendezvous, rank=rank, world_size=world, timeout=span)
    layers, _ = experiment.build()
    first = entry(layers)
    cells = cell_ranges(partition([_cost(layer, at < first, task.beam) for at, layer in enumerate(layers)], world),
                        len(layers))  # fmt: skip
    stage = Stage(layers, [cells[rank]], None, device, experiment.optimizer.precision, experiment.train.seed)
    step, heard = _load(task.run, experiment, stage, len(layers))
    part = Part(list(stage.layers), cells[rank].start, first, device, experiment.optimizer.precision == "bf16")
    holder = next(k for k, cell in enumerate(cells) if first in cell)
    groups = make_groups(place, GROUP_TIMEOUT) if world > 1 else None
    decoder = Decoder(place, part, holder, groups, device)
    dist.barrier()
    written = _written(task, decoder, place, experiment.text.max_tokens, step)
    dist.barrier()
    dist.destroy_process_group()
    return written, heard


def _written(task: Task, decoder: Decoder, place: Place, most: int, step: int) -> Written | None:
    groups = grouped(task.sources, task.beam)
    beams = {
        number: Beam([most] * len(group), task.beam, END_ID, task.length_penalty) for number, group in enumerate(groups)
    }
    begun = time.monotonic()
    with task.progress.open("ab", buffering=0) as progress:
        rows = [rectangle([task.sources[at] for at in group], PAD_ID) for group in groups]
        decoder.run(rows, BEGIN_ID, beams.__getitem__, lambda number: _tell(progress, groups[number], beams[number]))
    if not place.last:
        return None
    tokens: list[list[int]] = [[] for _ in task.sources]
    for number, group in enumerate(groups):
        for at, result in zip(group, beams[number].results, strict=True):
            tokens[at] = result
    return Written(tokens, step, time.monotonic() - begun)


def _tell(progress: Any, group: Sequence[int], beam: Beam) -> None:
    lines = [json.dumps([at, tokens]) for at, tokens in zip(group, beam.results, strict=True)]
    progress.write(("\n".join(lines) + "\n").encode())


def _cost(layer: nn.Module, once: bool, beam: int) -> float:
    """Returns a layer's share of the work: values of its matrix products, for each token of the source, or for each of
    each hypothesis. Tables that are looked up cost next to nothing."""
    values = sum(one.weight.numel() for one in layer.modules() if isinstance(one, nn.Linear))
    return 1.0 + values * (1 if once else beam)


def _load(run: RunFolder, experiment: Experiment, stage: Stage, count: int) -> tuple[int, list[str]]:
    """Fills a stage; returns the step of the checkpoint, and what is wrong with later ones."""
    heard: list[str] = []
    found = checkpoint.newest_valid(place_of(run, experiment), stage.indices, count, heard.append)
    if found is None:
        why = f" ({heard[0]})" if heard else ""
        raise CheckpointError(
            f"run {run.path} has no finished checkpoint{why}; train it to its first one with make resume RUN={run.path}"
        )
    checkpoint.load_values(found, stage)
    return found.step, heard


@contextmanager
def _watched(task: Task, heard: Callable[[int, list[int]], None]) -> Iterator[None]:
    """A context in which what is done is heard, about once in ``PERIOD``; at its end, all of it was.

    A line for which ``heard`` raises is heard again at the next look, so ``heard`` may get it twice. What the last look
    raises is raised here.
    """
    read, looking = 0, threading.Lock()

    def look() -> None:
        nonlocal read
        with looking:  # the last look waits for one that is still printing
            if not task.progress.exists():
                return
            with task.progress.open("rb") as file:
                file.seek(read)
                lines = file.read().splitlines(keepends=True)
            for line in lines:
                if line.endswith(b"\n"):
                    heard(*json.loads(line))
                    read += len(line)

    watching = Recurring(look, PERIOD, "progress", log_error)
    watching.start()
    try:
        yield
    finally:
        watching.end()
    look()


def _counted(count: int, console: Console) -> Callable[[int, list[int]], None]:
    """Returns what tells of each tenth of the sentences that is done, the first of them aside."""
    done = told = 0
    began = 0.0

    def heard(at: int, tokens: list[int]) -> None:
        nonlocal done, told, began
        done += 1
        if done == 1:
            began = time.monotonic()
        elapsed = time.monotonic() - began
        if done * 10 // count > told and elapsed > PERIOD / 2:
            told = done * 10 // count
            console.print(f"translated {done:,} of {count:,} sentences, {(done - 1) / elapsed:,.0f} a second")

    return heard
