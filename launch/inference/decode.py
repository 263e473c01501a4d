"""Decodes with a checkpoint of a trained run, in K stages, each a process on this machine."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from experiments.translation.experiment import TranslationExperiment
from launch.backends.processes import run_processes
from launch.error_log import log_error
from launch.inference.decoding_methods import DecodingMethod
from launch.runs.checkpoints import checkpoint_location
from launch.runs.store import RunFolder, resume_command
from launch.tracking.follower import LogTail
from launch.worker.devices import this_machine
from launch.worker.distributed import GROUP_TIMEOUT_S, init_process_group
from suite.cgroups import cpu_limit
from suite.data.text.tokenizer import PAD_ID
from suite.decoding.decode import Decoder
from suite.decoding.kv_cache import CachedLayers, first_cached_layer
from suite.errors import CheckpointError, SettingError
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.planning.partition import cell_ranges, partition
from suite.pipeline.runtime.stage import Stage
from suite.training import checkpoint
from suite.training.checkpoint import Choice
from suite.training.periodic import PeriodicThread

POLL_S = 1.0
"""Seconds between two reads of the workers' progress."""


@dataclass(frozen=True)
class DecodeOutput:
    results: list[list[Any]]
    """Of each source, by method: its output's tokens without special tokens, or the NLL of each known token."""
    step: int
    """The checkpoint's step."""
    seconds: float
    """From the first token to the last, without loading the model."""


def find_text_run(run: RunFolder) -> TranslationExperiment:
    """Returns the experiment of a run that can translate. Raises SettingError for any other."""
    experiment = read_experiment_file(run.experiment)
    if not isinstance(experiment, TranslationExperiment):
        raise SettingError(f"run {run.path} is no translation model ({experiment.data}); choose a run on parallel text")
    return experiment


def stages_of(experiment: Experiment, stages: int | None) -> int:
    """Returns K: ``stages``, or without it the fewest that hold the weights in half of each device's memory, limited by
    this machine's devices. Each additional stage costs messages for each token.

    Raises SettingError for more stages than layers, or than GPUs.
    """
    machine = this_machine()
    if stages is None:
        weights = 4 * count_parameters(experiment.build()[0])
        stages = min(machine.devices, experiment.list_length, -(-2 * weights // machine.bytes_per_device))
    if not 1 <= stages <= experiment.list_length:
        raise SettingError(
            f"stages is {stages}, the model has {experiment.list_length} layers; use 1 to {experiment.list_length}"
        )
    if machine.kind == "gpu" and stages > machine.devices:
        raise SettingError(f"stages is {stages}, there are {machine.devices} GPUs; use 1 to {machine.devices}")
    return stages


def decode(
    run: RunFolder,
    sources: Sequence[Sequence[int]],
    method: DecodingMethod,
    stages: int,
    console: Console,
    on_sentence: Callable[[int, list[Any]], None] | None = None,
    choice: Choice = None,
) -> DecodeOutput:
    """Decodes sources, token ids with the special ones, with the chosen checkpoint of the run.

    ``on_sentence`` gets the number and the result of each finished source; without it, progress is printed.

    Raises CheckpointError if there is no checkpoint, and StallError when a stage waits too long for another.
    """
    with TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        os.environ["OMP_NUM_THREADS"] = str(max(1, cpu_limit() // stages))
        with _progress_polled(progress, on_sentence or _progress_printer(len(sources), console)):
            results = run_processes(_worker, stages, run, sources, method, progress, choice, deadline_s=7 * 86400.0)
            decoded: DecodeOutput = results[-1][0]
    for line in results[0][1]:
        console.print(line)
    return decoded


def _worker(
    rank: int,
    world: int,
    rendezvous: str,
    run: RunFolder,
    sources: Sequence[Sequence[int]],
    method: DecodingMethod,
    progress_file: Path,
    choice: Choice,
) -> tuple[DecodeOutput | None, list[str]]:
    """Runs one stage. The last stage returns the decoded text, and the first the messages about invalid checkpoints."""
    experiment, coord = read_experiment_file(run.experiment), RankCoord(rank, world, 1)
    threads = experiment.train.threads or max(1, cpu_limit() // world)
    device = init_process_group(rank, world, rendezvous, threads, rank if this_machine().kind == "gpu" else None)
    layers, _ = experiment.build()
    first = first_cached_layer(layers)
    costs = [_cost(layer, at < first, method.rows) for at, layer in enumerate(layers)]
    cells = cell_ranges(partition(costs, world), len(layers))
    stage = Stage(layers, [cells[rank]], None, device, experiment.optimizer.precision, experiment.train.seed)
    step, messages = _load_stage(run, choice, experiment, stage, len(layers))
    part = CachedLayers(list(stage.layers), cells[rank].start, first, device, experiment.optimizer.precision == "bf16")
    holder = next(k for k, cell in enumerate(cells) if first in cell)
    groups = make_groups(coord, GROUP_TIMEOUT_S) if world > 1 else None
    decoder = Decoder(coord, part, holder, groups, device)
    dist.barrier()
    start = time.monotonic()
    with progress_file.open("ab", buffering=0) as progress:
        results = decode_groups(decoder, method, sources, partial(_write_progress, progress))
    seconds = time.monotonic() - start
    dist.barrier()
    dist.destroy_process_group()
    return DecodeOutput(results, step, seconds) if coord.has_loss else None, messages


def decode_groups(
    decoder: Decoder,
    method: DecodingMethod,
    sources: Sequence[Sequence[int]],
    on_group: Callable[[Sequence[int], Sequence[Sequence[Any]]], None] = lambda group, results: None,
) -> list[list[Any]]:
    """Decodes sources group by group with this stage of the model, and returns each one's result; on
    stages before the last, empty ones. ``on_group`` gets the numbers and the results of each finished group."""
    groups = method.groups(sources)
    searches = {number: method.search(group) for number, group in enumerate(groups)}
    rows = [
        pad_sequence([torch.tensor(sources[at]) for at in group], batch_first=True, padding_value=PAD_ID)
        for group in groups
    ]
    decoder.run(
        rows, method.first, searches.__getitem__, lambda number: on_group(groups[number], searches[number].results)
    )
    results: list[list[Any]] = [[] for _ in sources]
    for number, group in enumerate(groups):
        of_group: list[list[Any]] = [*searches[number].results]
        for at, result in zip(group, of_group, strict=True):
            results[at] = result
    return results


def _write_progress(progress: Any, group: Sequence[int], results: Sequence[Sequence[float]]) -> None:
    lines = [json.dumps([at, tokens]) for at, tokens in zip(group, results, strict=True)]
    progress.write(("\n".join(lines) + "\n").encode())


def _cost(layer: nn.Module, is_encoder: bool, beam: int) -> float:
    """Returns a layer's cost: weights of its matrix products, once a token in the encoder and once a hypothesis and
    token in the decoder. Embedding lookups cost almost nothing."""
    values = sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear))
    return 1.0 + values * (1 if is_encoder else beam)


def _load_stage(
    run: RunFolder, choice: Choice, experiment: Experiment, stage: Stage, count: int
) -> tuple[int, list[str]]:
    """Loads a stage's weights; returns the checkpoint's step, and on rank 0 messages about invalid checkpoints."""
    messages: list[str] = []
    select = partial(checkpoint.in_order, choice=choice, place=f"run {run.path}")
    location = checkpoint_location(run, experiment)
    found = checkpoint.newest_valid(location, stage.indices, count, messages.append, select)
    if found is None:
        why = f" ({messages[0]})" if messages else ""
        raise CheckpointError(
            f"run {run.path} has no valid checkpoint{why}; train it to its first one with {resume_command(run)}"
        )
    checkpoint.load_values(found, stage)
    return found.step, messages


@contextmanager
def _progress_polled(progress: Path, on_sentence: Callable[[int, list[Any]], None]) -> Iterator[None]:
    """A context that passes finished sentences to ``on_sentence`` every ``POLL_S``, and the rest of them at its end.
    The file ``progress`` has a line of JSON for each: its number and its result.

    A sentence for which ``on_sentence`` raises is passed again at the next poll. Errors of the last poll are raised.
    """
    tail, waiting, poll_lock = LogTail(progress), deque[str](), threading.Lock()

    def poll() -> None:
        with poll_lock:  # the last poll waits for a running one
            waiting.extend(tail.lines())
            while waiting:
                on_sentence(*json.loads(waiting[0]))
                waiting.popleft()

    with PeriodicThread(poll, POLL_S, "progress", log_error):
        yield
    poll()


def _progress_printer(count: int, console: Console) -> Callable[[int, list[Any]], None]:
    """Returns a callback that prints each finished tenth of the sentences, except in the first moment."""
    done = printed_tenths = 0
    start = 0.0

    def on_sentence(at: int, tokens: list[Any]) -> None:
        nonlocal done, printed_tenths, start
        done += 1
        if done == 1:
            start = time.monotonic()
        elapsed = time.monotonic() - start
        if done * 10 // count > printed_tenths and elapsed > POLL_S / 2:
            printed_tenths = done * 10 // count
            console.print(f"translated {done:,} of {count:,} sentences, {(done - 1) / elapsed:,.0f} a second")

    return on_sentence
