"""What each of the K x R workers does, whoever started it: builds its stage, trains, writes its share of the record."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.experiment import Experiment
from experiments.registry import read_experiment
from launch.ahead import Ahead
from launch.beats import Beating
from launch.checkpoints import place_of, place_of_run
from launch.engine import GROUP_TIMEOUT, Engine, assemble
from launch.feeds import Feed, feed_of
from launch.limits import cores
from launch.record import make_record, peak_memory, write_record
from launch.runs import RunFolder
from launch.tracking import config_of, identity_of
from suite.errors import CheckpointError, ProgramError, StallError, SuiteError, Where
from suite.pipeline.action import Action
from suite.pipeline.allocation import keep_freed_memory
from suite.pipeline.doing import Doing
from suite.pipeline.faults import planned
from suite.pipeline.partition import cell_ranges
from suite.pipeline.recipe import Recipe
from suite.pipeline.stage import Stage
from suite.pipeline.step import Executor
from suite.pipeline.topology import Place
from suite.pipeline.transport import Deadline, explain
from suite.training import checkpoint
from suite.training.gauges import Gauges
from suite.training.loop import STEPS_A_DEADLINE, Progress, Worker, evaluate, train
from suite.training.sharpness import Sharpness
from suite.training.spikes import Spikes
from suite.training.trace import TraceWriter
from suite.training.trackers import JsonLines, Tracker
from suite.training.wandb_run import Wandb


@dataclass(frozen=True)
class Job:
    """What a worker is told: all else stands in the run's folder."""

    folder: Path
    data: Path
    cells: tuple[int, ...]
    """Layers of each cell, as planned."""
    recipe: Recipe
    """What is walked, as planned."""
    use_gpu: bool
    resume: bool
    attempt: int = 1
    """Counts over the whole life of the run."""
    faults: str = ""
    """What a test plans (``suite.pipeline.faults``)."""
    step_s: float = 0.0
    """How long a step takes, as planned."""
    shrunk: bool = False
    """Whether the run has fewer devices than it was asked for."""

    @property
    def run(self) -> RunFolder:
        """The run's folder by name."""
        return RunFolder(self.folder)

    @property
    def timeout_s(self) -> float:
        """Seconds that a wait, a collective or one action may last before a step's real length is known."""
        return max(GROUP_TIMEOUT, STEPS_A_DEADLINE * self.step_s)

    def experiment(self) -> Experiment:
        """The resolved experiment; of a resumed run that has not started yet, the draft; of a run on fewer devices
        than it was asked for, what it is meanwhile."""
        asked = self.draft if self.draft.exists() else self.run.experiment
        return read_experiment((self.run.shrunk if self.shrunk else asked).read_text())

    @property
    def draft(self) -> Path:
        """What the experiment will be once the workers stand that it asks for."""
        return self.run.experiment.with_suffix(".draft")


def threads_of(experiment: Experiment) -> int:
    """Returns the compute threads of a stage: as set, or this machine's cores shared out."""
    workers = experiment.pipeline.stages * experiment.pipeline.replicas
    return experiment.train.threads or max(1, cores() // workers)


LOAD_PATIENCE = 1800.0
"""Seconds that all workers together may take to read a checkpoint; each may be GROUP_TIMEOUT behind another."""

COLLATERAL_S = 2.0
"""Seconds for which a worker keeps to itself that others left it waiting: theirs is the first cause, and told first."""


def work(job: Job, rank: int, node: str = "") -> None:
    """Runs one worker to the end of the job. torch.distributed must stand already.

    Raises whatever SuiteError ends the run, the same on all workers where all know it; ProgramError for any other
    exception.
    """
    experiment = job.experiment()
    place = Place(rank, experiment.pipeline.stages, experiment.pipeline.replicas)
    log_to(job.run.log(place.replica, place.stage))
    faults = planned(job.faults, place, job.attempt, job.run.checkpoints)
    doing = Doing(Deadline(job.timeout_s), faults, usual=job.timeout_s)
    with Beating(job.run.beats, place, job.attempt, doing, node):
        try:
            if doing.faults is not None:
                doing.turn("start", None)
            _work(job, experiment, place, doing)
        except Exception as error:
            with suppress(OSError):  # the log may lie on a full disk
                traceback.print_exc()  # into this worker's log; elsewhere only one sentence is shown
            told = _told(error, job, place, doing)
            if isinstance(told, StallError):
                time.sleep(COLLATERAL_S)
            raise told from error


def _told(error: Exception, job: Job, place: Place, doing: Doing) -> SuiteError:
    """Returns what the supervisor is told of an exception."""
    if isinstance(error, SuiteError):
        return error
    if isinstance(error, RuntimeError):
        explained = explain(error, f"the other workers ({place})", job.timeout_s)
        if isinstance(explained, SuiteError):
            return explained
    action, layer = doing.what, doing.layer
    log, host = str(job.run.log(place.replica, place.stage)), socket.gethostname()
    where = Where(place.replica, place.stage, doing.step, str(action), layer, host, log)
    at = str(action) + (f" of step {doing.step}" if doing.step is not None else "")
    if isinstance(action, Action):
        at += f", micro-batch {action.micro_batch}"
    if layer is not None and doing.stage is not None:
        kind = type(doing.stage.layers[doing.stage.indices.index(layer)]).__name__
        at += f", in layer {layer} ({kind})"
    elif isinstance(action, Action) and action.kind in "BW" and doing.stage is not None:
        cell = doing.stage.cells[action.turn]
        at += f", in one of layers {cell.start}-{cell.stop - 1}"
    what = type(error).__name__
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return ProgramError(f"{place} on {host}, {at}: {what}: {first}; its log is {log}", what, where)


def _work(job: Job, experiment: Experiment, place: Place, doing: Doing) -> None:
    torch.set_num_threads(threads_of(experiment))
    keep_freed_memory()
    with doing.waits("the other workers' start", job.timeout_s):
        run = _begin(job, experiment, place, doing)
    with run.gauges:
        progress = train(
            run.worker, experiment.train, Progress(run.engine.start, int(run.engine.notes.get("units", 0)))
        )
    run.batches.close()
    with doing.waits("the end of the run", job.timeout_s):
        held_out = run.feed.held_out()
        score = evaluate(run.engine.executor, held_out)
        memory = peak_memory(job.use_gpu)
        if place.speaks:
            measure = experiment.measure
            scores = {f"valid_{measure}": score, f"baseline_{measure}": run.feed.baseline(held_out)}
            record = make_record(
                job.run, experiment, run.layers, progress, scores, memory, run.wandb_run, run.feed.counts()
            )
            write_record(job.run, record)
        dist.barrier()
        if place.speaks:
            run.gauges.look()
            for tracker in run.worker.trackers:
                tracker.finish(record)


@dataclass(frozen=True)
class Begun:
    """What a worker trains with."""

    layers: list[torch.nn.Module]
    engine: Engine
    feed: Feed
    batches: Ahead
    worker: Worker
    gauges: Gauges
    wandb_run: str | None


def _begin(job: Job, experiment: Experiment, place: Place, doing: Doing) -> Begun:
    """Builds the engine, from a checkpoint where the job resumes, and all that it trains with. All workers must call
    it."""
    say = speaker(job.run.messages)
    layers, loss = experiment.build()
    device = torch.device("cuda", torch.cuda.current_device()) if job.use_gpu else torch.device("cpu")

    def newest(stage: Stage) -> checkpoint.Checkpoint | None:
        if not job.resume:
            return None
        with doing.waits("all workers to read the checkpoint", LOAD_PATIENCE):
            return checkpoint.newest_valid(place_of(job.run, experiment), stage.indices, len(layers), say)

    engine = assemble(
        place, layers, loss, cell_ranges(job.cells, len(layers)), device, job.recipe, experiment.optimizer,
        experiment.train.seed, newest, getattr(experiment.train, "averages_over_replicas", True),
        lambda stage: _fill(experiment, stage, say), doing,
    )  # fmt: skip
    doing.start = engine.start
    _plan_faults(engine.executor)
    feed = feed_of(experiment, job.data, place)
    feed.check(engine.notes)
    dist.barrier()  # every worker has read the experiment, and its checkpoint where it resumes
    if job.resume and place.rank == 0:
        if job.draft.exists():
            job.draft.rename(job.run.experiment)
        say(f"resumed at step {engine.start}" if engine.start else "no usable checkpoint: training starts at step 0")
    gauges = Gauges(job.run.system, place, job.attempt, doing, device)
    trackers, wandb = _trackers(job, experiment, engine, gauges, say) if place.speaks else ([], None)
    run_id = _from_speaker(wandb.run_id if wandb else None, place)
    fixed = {"name": experiment.name, "seed": experiment.train.seed, "wandb_run": run_id} | feed.notes()
    saver = checkpoint.Saver(
        checkpoint.Storage(place_of(job.run, experiment)), engine.executor.stage, engine.optimizer, place,
        lambda units: {"units": units} | fixed, say, engine.start,
    )  # fmt: skip
    walked = str((experiment.pipeline, job.cells, job.recipe))
    trace = TraceWriter(job.run.traces, place, device, engine.start, experiment.trace, walked)
    batches = Ahead(feed.batch, experiment.train.steps, engine.executor.foresee)
    worker = Worker(
        engine.executor, engine.optimizer, engine.deadline, batches, saver, trackers, trace,
        experiment.unit, experiment.measure, _sharpness(job, experiment, engine), say,
    )  # fmt: skip
    return Begun(layers, engine, feed, batches, worker, gauges, run_id)


def _sharpness(job: Job, experiment: Experiment, engine: Engine) -> Sharpness | None:
    every = experiment.train.sharpness_every
    if every is None:
        return None
    path = job.run.layers if engine.executor.place.speaks else None
    return Sharpness(engine.executor, every, engine.start, path)


def _plan_faults(executor: Executor) -> None:
    """Gives a test's plan the layers and lanes it may strike."""
    faults = executor.doing.faults
    if faults is None:
        return
    faults.arm(dict(zip(executor.stage.indices, executor.stage.layers, strict=True)))
    for way in executor.ways:
        if way.transport is not None and faults.latest:
            way.transport.late = faults.late


def _fill(experiment: Experiment, stage: Stage, say: Callable[[str], None]) -> None:
    """Fills a new stage with another run's weights where the experiment asks for that; not the last layer's."""
    source = getattr(experiment.train, "start_from", None)
    if source is None:
        return
    indices = [index for index in stage.indices if index < experiment.list_length - 1]
    found = checkpoint.newest_valid(place_of_run(Path(source)), indices, experiment.list_length, say)
    if found is None:
        raise CheckpointError(f"{source} has no whole checkpoint; give train.start_from a run that was trained")
    checkpoint.load_values(found, stage, indices)


def _trackers(
    job: Job, experiment: Experiment, engine: Engine, gauges: Gauges, say: Callable[[str], None]
) -> tuple[list[Tracker], Wandb]:
    identity = identity_of(job.run, experiment, job.recipe, engine.notes.get("wandb_run"))
    config = config_of(experiment, job.cells, job.recipe, job.step_s)
    wandb = Wandb(job.folder, experiment.tracking, identity, config, say, gauges.newest)
    return [JsonLines(job.run.metrics, engine.start), Spikes(job.run.spikes, engine.start, say), wandb], wandb


def _from_speaker(run_id: str | None, place: Place) -> str | None:
    """Gives the speaker's wandb run to all workers: the manifest, which rank 0 writes, names it."""
    shared: list[Any] = [run_id]
    dist.broadcast_object_list(shared, src=place.rank_of(0, place.stages - 1))
    return shared[0]  # type: ignore[no-any-return]


def speaker(messages: Path) -> Callable[[str], None]:
    """Returns what tells a person at the terminal something, and keeps it in the run's folder."""

    def say(text: str) -> None:
        try:
            with messages.open("a") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        except OSError as error:  # a full disk must not end the run for a word about it
            with suppress(OSError):
                print(f"{text} ({error})", file=sys.stderr, flush=True)

    return say


def log_to(log: Path) -> None:
    """Sends this process's standard output and error to its own log file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
