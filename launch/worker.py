"""What each of the K x R workers does, whoever started it: builds its stage, trains, writes its share of the record."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.experiment import Experiment
from launch.devices import cores
from launch.runs import RunFolder
from suite.data.batching import TranslationBatches
from suite.data.text import TextData
from suite.evaluation.unigram import unigram_entropy
from suite.pipeline.layers import cost_of, count_parameters
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.partition import cell_ranges, partition
from suite.pipeline.stage import Stage
from suite.pipeline.step import Executor
from suite.pipeline.ties import Ties, find_ties
from suite.pipeline.topology import Place, make_groups
from suite.pipeline.transport import Deadline, Transport
from suite.training import checkpoint
from suite.training.loop import FIRST_DEADLINE, Progress, Worker, evaluate, train
from suite.training.optimizer import StageOptimizer, named_parameters
from suite.training.trackers import JsonLines, Tracker, Wandb, read_lines

GROUP_TIMEOUT = 300.0
"""Seconds a collective may last: far beyond a checkpoint's writing, far below torch's half hour."""


@dataclass(frozen=True)
class Job:
    """What a worker is told: all else stands in the run's folder."""

    folder: Path
    data: Path
    resume: bool

    @property
    def run(self) -> RunFolder:
        """The run's folder by name."""
        return RunFolder(self.folder)

    def experiment(self) -> Experiment:
        """The resolved experiment."""
        return Experiment.from_toml(self.run.experiment.read_text())


def threads_of(experiment: Experiment) -> int:
    """Returns the compute threads of a stage: as set, or this machine's cores shared out."""
    workers = experiment.pipeline.stages * experiment.pipeline.replicas
    return experiment.train.threads or max(1, cores() // workers)


def cells_of(experiment: Experiment, layers: list[nn.Module]) -> list[range]:
    """Returns each stage's layers: by hand if set, otherwise the exact cut of the layers' cost hints."""
    pipeline = experiment.pipeline
    return cell_ranges(pipeline.cells or partition([cost_of(layer) for layer in layers], pipeline.stages), len(layers))


def work(job: Job, rank: int) -> None:
    """Runs one worker to the end of the job. torch.distributed must stand already.

    Raises whatever SuiteError ends the run; the same on all workers where all know it.
    """
    experiment = job.experiment()
    pipeline = experiment.pipeline
    place = Place(rank, pipeline.stages, pipeline.replicas)
    _write_to(job.run.log(place.replica, place.stage))
    torch.set_num_threads(threads_of(experiment))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    say = _speaker(job.run.messages)

    layers, loss = experiment.build()
    cells = cells_of(experiment, layers)
    groups = make_groups(place, GROUP_TIMEOUT)
    deadline = Deadline(FIRST_DEADLINE)
    precision, seed = experiment.optimizer.precision, experiment.train.seed
    stage = Stage(layers, cells[place.stage], loss if place.last else None, device, precision, seed)
    found = checkpoint.newest_valid(job.run.checkpoints, stage.indices, say) if job.resume else None
    if found is not None:
        checkpoint.load_values(found, stage)
    named = named_parameters(stage.indices, stage.layers)
    ties = Ties(find_ties(layers, cells), place, named, GROUP_TIMEOUT)
    ties.equalise()
    optimizer = StageOptimizer(stage.layers, named, len(layers), ties, place, groups, device, experiment.optimizer)
    if found is not None:
        checkpoint.load_optimizer(found, stage, optimizer)
    transport = Transport(place, groups, device, deadline) if pipeline.stages > 1 else None
    executor = Executor(place, stage, transport, pipeline.remat)

    text = _Text(job, experiment, place)
    start = found.step if found is not None else 0
    if job.resume and place.rank == 0:
        say(f"resumed at step {start}" if found is not None else "no usable checkpoint: training starts at step 0")
    notes = found.manifest if found is not None else {}
    trackers, wandb = _trackers(job, experiment, start, notes.get("wandb_run"), say) if place.speaks else ([], None)
    run_id = _agree(wandb.run_id if wandb else None, place)

    def save(step: int, tokens: int) -> None:
        written = {"tokens": tokens, "name": experiment.name, "seed": experiment.train.seed, "wandb_run": run_id}
        checkpoint.save(job.run.checkpoints, step, stage, optimizer, place, written)

    worker = Worker(executor, optimizer, deadline, text.batch, save, trackers)
    progress = train(worker, experiment.train, Progress(start, int(notes.get("tokens", 0))))
    held_out = text.held_out()
    valid_nll = evaluate(executor, held_out)
    memory = _peak_memory()
    if place.speaks:
        baseline = unigram_entropy(target for batch in held_out if batch for (target,) in batch.targets)
        scores = {"valid_nll": valid_nll, "baseline_nll": baseline}
        record = _record(job, experiment, layers, progress, run_id, memory, scores)
        for tracker in trackers:
            tracker.finish(record)
        _write_record(job.run.record, record)
    dist.barrier()


class _Text:
    """Batches for the stages that need them, none for those between."""

    def __init__(self, job: Job, experiment: Experiment, place: Place) -> None:
        self._place, self._train, self._pipeline = place, experiment.train, experiment.pipeline
        self._batches: TranslationBatches | None = None
        if place.first or place.last:
            data = TextData.open(job.data)
            self._batches = TranslationBatches(
                data, experiment.text, experiment.train, experiment.pipeline.replicas, experiment.pipeline.micro_batches
            )

    def batch(self, step: int) -> MiniBatch | None:
        return self._batches.batch(step, self._place.replica) if self._batches is not None else None

    def held_out(self) -> list[MiniBatch] | list[None]:
        """Returns as many mini-batches on every stage; those between get their number from the first."""
        batches: Any = None
        if self._batches is not None:
            batches = self._batches.held_out(self._train.valid_pairs, self._pipeline.micro_batches)
        count: list[Any] = [len(batches) if batches is not None else None]
        dist.broadcast_object_list(count, src=0)
        return batches if batches is not None else [None] * int(count[0])


def _trackers(
    job: Job, experiment: Experiment, start: int, run_id: str | None, say: Callable[[str], None]
) -> tuple[list[Tracker], Wandb]:
    name = f"{experiment.name}/{job.folder.name}"
    config = experiment.model_dump(mode="json")
    wandb = Wandb(job.folder, experiment.tracking, name, config, run_id, say)
    return [JsonLines(job.run.metrics, start), wandb], wandb


def _record(
    job: Job, experiment: Experiment, layers: list[nn.Module], progress: Progress, run_id: str | None,
    memory: list[int], scores: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    lines = read_lines(job.run.metrics)
    seconds = sum(line["seconds"] for line in lines)
    pipeline = experiment.pipeline
    return {
        "name": experiment.name, "scale": experiment.scale, "corpus": experiment.text.corpus,
        "K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches,
        "layers": len(layers), "parameters": count_parameters(layers),
        "steps": progress.step, "tokens": progress.tokens, "seconds": seconds,
        "tokens_per_second": progress.tokens / seconds,
        "loss_first": lines[0]["loss"], "loss_last": lines[-1]["loss"], **scores,
        "threads": torch.get_num_threads(), "peak_memory_bytes": sum(memory), "shrunk": list(experiment.shrunk),
        "wandb_run": run_id,
    }  # fmt: skip


def _write_record(path: Path, record: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.rename(path)


def _peak_memory() -> list[int]:
    """Returns the most memory each worker ever held, in bytes: on a GPU allocated there, otherwise resident."""
    if torch.cuda.is_available():
        mine = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    return shares


def _agree(run_id: str | None, place: Place) -> str | None:
    """Gives the speaker's wandb run to all workers: the manifest, which rank 0 writes, names it."""
    shared: list[Any] = [run_id]
    dist.broadcast_object_list(shared, src=place.rank_of(0, place.stages - 1))
    return shared[0]  # type: ignore[no-any-return]


def _write_to(log: Path) -> None:
    """Sends this process's standard output and error to its own log file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _speaker(messages: Path) -> Callable[[str], None]:
    def say(text: str) -> None:
        with messages.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    return say
