"""The program of each of the K x R workers: builds its stage, trains, and writes its part of the run's record."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from experiments.base.data_source import DataSource
from experiments.base.experiment import Experiment
from launch.runs.checkpoints import checkpoint_location, note_published
from launch.runs.record import RunResult, write_record
from launch.worker.attempt import AttemptSpec, run_logger, threads_of
from launch.worker.engine import Engine, PartitionedModel, assemble
from launch.worker.feed_processes import FeedProcesses, feed_process_count
from launch.worker.gpu_debug import leave_gpu_dumps
from launch.worker.heartbeat import HeartbeatWriter
from launch.worker.loading import initialize, load_to_resume, take_over
from launch.worker.log_file import log_to
from launch.worker.peak import device_peak
from launch.worker.prefetch import Prefetcher
from launch.worker.wandb_identity import wandb_config, wandb_identity
from models.chunked_loss import set_logits_bytes
from suite.errors import FailureLocation, ProgramError, StallError, SuiteError
from suite.exchange import broadcast, gather
from suite.log import Log
from suite.paths import sync_folder
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.memory_tracker import keep_freed_memory
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.runtime.communication_errors import explain, summary
from suite.pipeline.runtime.fault_injection import inject_faults
from suite.pipeline.runtime.p2p import Deadline
from suite.pipeline.runtime.stage import Stage
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.action import Action
from suite.training import checkpoint
from suite.training.layer_stats import LayerStats
from suite.training.loop import Progress, TrainingSetup, train
from suite.training.loss_spikes import LossSpikes
from suite.training.profiling import step_profiler
from suite.training.system_metrics import SystemMetrics, peak_bytes
from suite.training.trace import TraceWriter
from suite.training.trackers import MetricsFile, TensorBoard, Tracker
from suite.training.utilization import Utilization
from suite.training.validation import Validation, notes_of, state_of
from suite.training.wandb_run import Wandb

LOAD_TIMEOUT_S = 1800.0
"""Seconds for all workers to read a checkpoint; each may be GROUP_TIMEOUT_S behind another."""

STALL_REPORT_DELAY_S = 2.0
"""Seconds by which a worker that lost its neighbour delays its report, so that the root cause is reported first."""


def train_stage(spec: AttemptSpec, rank: int, node: str = "") -> None:
    """Runs one worker to the end of the job. The default process group must exist.

    Raises the SuiteError that ends the run, the same on all workers that know it; ProgramError for any other exception.
    """
    experiment = spec.experiment()
    coord = RankCoord(rank, experiment.pipeline.stages, experiment.pipeline.replicas)
    log_to(spec.run.log(coord.replica, coord.stage))
    status = WorkerStatus(Deadline(spec.timeout_s), action_timeout_s=spec.timeout_s)
    with HeartbeatWriter(spec.heartbeats, coord, spec.attempt, status, node) if spec.heartbeats else nullcontext():
        try:
            if spec.fault_plan:
                inject_faults(spec.fault_plan, coord, spec.attempt, spec.run.checkpoints, status)
            dumps: AbstractContextManager[None] = nullcontext()
            if spec.use_gpu:
                profiled = experiment.train.profile_steps is not None
                dumps = leave_gpu_dumps(spec.run.gpu, coord, spec.attempt, status, with_stacks=profiled)
            with dumps:
                _train_stage(spec, experiment, coord, status)
        except Exception as error:
            with suppress(OSError):  # the log may be on a full disk
                traceback.print_exc()  # goes to this worker's log; the terminal shows one sentence
            reported = _as_reported_error(error, spec, coord, status)
            # NCCL may call it an internal error on one worker that another has failed
            if isinstance(reported, StallError) or (isinstance(reported, ProgramError) and "NCCL error" in str(error)):
                time.sleep(STALL_REPORT_DELAY_S)
            raise reported from error


def _as_reported_error(error: Exception, spec: AttemptSpec, coord: RankCoord, status: WorkerStatus) -> SuiteError:
    """Converts an exception to the error reported to the supervisor."""
    if isinstance(error, SuiteError):
        return error
    if isinstance(error, RuntimeError):
        explained = explain(error, f"the other workers ({coord})", spec.timeout_s)
        if isinstance(explained, SuiteError):
            return explained
    action, layer = status.action, status.layer
    log_file, host = str(spec.run.log(coord.replica, coord.stage)), socket.gethostname()
    where = FailureLocation(coord.replica, coord.stage, status.step, str(action), layer, host, log_file)
    place = str(action) + (f" of step {status.step + 1}" if status.step is not None else "")
    if isinstance(action, Action):
        place += f", micro-batch {action.micro_batch}"
    if layer is not None and status.stage is not None:
        layer_type = type(status.stage.layer(layer)).__name__
        place += f", in layer {layer} ({layer_type})"
    elif isinstance(action, Action) and action.kind in "IBW" and status.stage is not None:
        cell = status.stage.cells[action.virtual_stage]
        place += f", in one of layers {cell.start}-{cell.stop - 1}"
    error_type = type(error).__name__
    message = f"{coord} on {host}, {place}: {error_type}: {summary(error)}; its log is {log_file}"
    return ProgramError(message, error_type, where)


def _train_stage(spec: AttemptSpec, experiment: Experiment, coord: RankCoord, status: WorkerStatus) -> None:
    torch.set_num_threads(threads_of(experiment))
    keep_freed_memory()
    with status.waiting_for("the other workers' start", spec.timeout_s):
        context = _build_context(spec, experiment, coord, status)
    engine = context.engine
    with context.system_metrics:
        progress = train(context.setup, experiment.train, Progress(engine.start, int(engine.notes.get("units", 0))))
    context.batches.close()
    with status.waiting_for("the end of the run", spec.timeout_s):
        if context.setup.validation is not None:
            context.setup.validation.figures(progress.step)  # those of the last step, already known unless it resumed
        memory = gather(peak_bytes(engine.executor.stage.device))
        if coord.is_metrics_rank:
            validation, utilization, source = context.setup.validation, context.setup.utilization, context.source
            peak = utilization.peak if utilization is not None else None
            baselines = source.baselines(validation.held_out) if validation is not None else {}
            bytes_per_unit = source.bytes_per_unit(validation.held_out) if validation is not None else None
            result = RunResult(
                progress, _validated(experiment, validation, progress.step), baselines, bytes_per_unit, memory,
                context.wandb_run, source.counts(), peak,
            )  # fmt: skip
            record = write_record(spec.run, experiment, context.layers, result)
        dist.barrier()
        if coord.is_metrics_rank:
            context.system_metrics.sample()
            for tracker in context.setup.trackers:
                tracker.finish(record)


def _validated(experiment: Experiment, validation: Validation | None, step: int) -> dict[str, Any]:
    """Returns what the record says of the held-out data, after the last step."""
    if validation is None:
        return {"stopped_early": False}
    figures = validation.figures(step)
    weights = {f"valid_{experiment.unit}": figures.weights} if figures.weights else {}
    return weights | {
        **{f"valid_{n}": value for n, value in zip(experiment.metric_names, figures.metrics, strict=True)},
        "best_step": validation.state.best_step,
        "validations_without_improvement": validation.state.unimproved,
        f"best_valid_{experiment.criterion.name}": validation.state.best,
        "stopped_early": validation.stopped_early(step) or False,
    }


@dataclass(frozen=True)
class TrainingContext:
    """The objects that a worker trains with."""

    layers: list[torch.nn.Module]
    engine: Engine
    source: DataSource
    batches: Prefetcher
    setup: TrainingSetup
    system_metrics: SystemMetrics
    wandb_run: str | None


def _build_context(
    spec: AttemptSpec, experiment: Experiment, coord: RankCoord, status: WorkerStatus
) -> TrainingContext:
    """Builds the engine, from a checkpoint if the job resumes, and the objects for training. All workers must call
    it."""
    log = run_logger(spec.run.messages)
    layers, loss = experiment.build()
    set_logits_bytes(layers, spec.logits_bytes)
    device = torch.device("cuda", torch.cuda.current_device()) if spec.use_gpu else torch.device("cpu")
    model = PartitionedModel(layers, loss, cell_ranges(spec.cells, len(layers)), spec.schedule_config)
    engine, source = _load_engine(spec, experiment, coord, status, model, device, log)
    utilization = None
    if coord.is_metrics_rank and spec.flops is not None:
        peak = device_peak(device, experiment.optimizer.precision, spec.costs)
        utilization = Utilization(spec.flops, peak, coord.stages * coord.replicas)
    _begin_attempt(spec, experiment, coord, engine, log)
    status.first_step = engine.start
    system_metrics = SystemMetrics(spec.run.system, coord, spec.attempt, status, device)
    trackers, wandb = _trackers(spec, experiment, engine, system_metrics, log) if coord.is_metrics_rank else ([], None)
    metrics_rank = coord.rank_of(0, coord.stages - 1)
    run_id: str | None = broadcast(wandb.run_id if wandb else None, metrics_rank)  # rank 0 writes the manifest
    notes = {"name": experiment.name, "seed": experiment.train.seed, "wandb_run": run_id} | source.notes()
    validation = _validation(experiment, engine, source)
    saver = _saver(spec, experiment, engine, validation, notes, log)
    schedule_key = str((experiment.pipeline, spec.cells, spec.schedule_config))
    trace = TraceWriter(spec.run.traces, coord, device, engine.start, experiment.trace, schedule_key)  # compares clocks
    batches = _batches(spec, experiment, coord, engine, source, device)
    setup = TrainingSetup(
        engine.executor,
        engine.optimizer,
        batches,
        saver,
        trackers,
        trace,
        experiment.unit,
        experiment.metric_names,
        _layer_stats(spec, experiment, engine),
        validation,
        log,
        utilization,
        step_profiler(experiment.train, spec.run.profile, coord, device),
    )
    return TrainingContext(layers, engine, source, batches, setup, system_metrics, run_id)


def _load_engine(
    spec: AttemptSpec,
    experiment: Experiment,
    coord: RankCoord,
    status: WorkerStatus,
    model: PartitionedModel,
    device: torch.device,
    log: Log,
) -> tuple[Engine, DataSource]:
    """Returns the engine with its weights, and the data, which must fit the checkpoint or the weights' source."""
    vocabulary: dict[str, Any] = {}

    def load_weights(stage: Stage) -> checkpoint.Checkpoint | None:
        loaded = None
        if spec.resume:
            with status.waiting_for("all workers to read the checkpoint", LOAD_TIMEOUT_S):
                loaded = load_to_resume(spec.run, experiment, stage, log, spec.checkpoint_step)
        if loaded is not None:
            checkpoint.load_values(loaded, stage)
        else:
            vocabulary.update(initialize(experiment, stage, log))
        return loaded

    sync_batchnorm_stats = getattr(experiment.train, "sync_batchnorm_stats", True)
    optimizer, seed, factors = experiment.optimizer, experiment.train.seed, experiment.update_factors
    engine = assemble(coord, model, device, optimizer, seed, load_weights, sync_batchnorm_stats, status, factors)
    source = experiment.data_source(spec.data, coord)
    if warning := source.check(engine.notes or vocabulary):
        log(warning)
    return engine, source


def _begin_attempt(spec: AttemptSpec, experiment: Experiment, coord: RankCoord, engine: Engine, log: Log) -> None:
    """Takes over the checkpoints, and replaces the experiment of a resumed run."""
    dist.barrier()  # every worker has read the experiment, and its checkpoint if it resumes
    if spec.resume:
        take_over(spec.run, experiment, spec.owner_of_attempt, spec.checkpoint_step)  # before later steps go
    if spec.resume and coord.rank == 0:
        if spec.draft.exists():
            spec.draft.replace(spec.run.experiment)
            sync_folder(spec.run.path)
        log(f"resumed at step {engine.start}" if engine.start else "no usable checkpoint: training starts anew")
    if spec.checkpoint_step is not None and coord.is_metrics_rank:
        spec.run.record.unlink(missing_ok=True)  # of later steps; a driver elsewhere removes its own copy


def _validation(experiment: Experiment, engine: Engine, source: DataSource) -> Validation | None:
    """Returns the validation on held-out data; None without such data."""
    if not source.has_held_out:
        return None
    validation = Validation(
        engine.executor,
        source.held_out,
        experiment.metric_names,
        experiment.criterion,
        experiment.train,
        state_of(engine.notes),
    )
    best_step = validation.state.best_step
    if best_step is not None and best_step != engine.best_step:
        validation.forget(best_step)  # its checkpoint is gone, so a new best one is needed
    return validation


def _saver(
    spec: AttemptSpec,
    experiment: Experiment,
    engine: Engine,
    validation: Validation | None,
    notes: dict[str, Any],
    log: Log,
) -> checkpoint.Saver:
    return checkpoint.Saver(
        checkpoint.Storage(checkpoint_location(spec.run, experiment)),
        engine.optimizer,
        lambda units: {"units": units} | notes_of(validation) | notes,
        log,
        engine.start,
        on_failure=validation.forget if validation is not None else lambda step: None,
        owner=spec.owner_of_attempt,
        on_published=partial(note_published, spec.run),
    )


def _batches(
    spec: AttemptSpec,
    experiment: Experiment,
    coord: RankCoord,
    engine: Engine,
    source: DataSource,
    device: torch.device,
) -> Prefetcher:
    """Returns this worker's mini-batches: made by processes beside a GPU, otherwise by a thread, in the bubble on the
    first stage of several."""
    processes = feed_process_count(device) if source.is_thread_safe and (coord.is_first or coord.is_last) else 0
    make: Callable[[int], MiniBatch | None] = source.batch
    if processes:
        steps = range(engine.start, experiment.train.steps)
        make = FeedProcesses(experiment, spec.data, coord, steps, processes)
    fills_bubble = coord.is_first and not coord.is_last and not processes
    batches = Prefetcher(
        make, experiment.train.steps, engine.executor.prefetch_shapes, source.is_thread_safe, not fills_bubble
    )
    if fills_bubble:
        engine.executor.on_drain = batches.start_next
    return batches


def _layer_stats(spec: AttemptSpec, experiment: Experiment, engine: Engine) -> LayerStats | None:
    every = experiment.train.layer_stats_every
    if every is None:
        return None
    path = spec.run.layers if engine.executor.coord.is_metrics_rank else None
    return LayerStats(engine.executor, every, engine.start, path)


def _trackers(
    spec: AttemptSpec, experiment: Experiment, engine: Engine, system_metrics: SystemMetrics, log: Callable[[str], None]
) -> tuple[list[Tracker], Wandb]:
    identity = wandb_identity(spec.run, experiment, spec.schedule_config, engine.notes.get("wandb_run"))
    config = wandb_config(experiment, spec.cells, spec.schedule_config, spec.step_s)
    wandb = Wandb(spec.folder, experiment.tracking, identity, config, log, system_metrics.latest)
    trackers: list[Tracker] = [MetricsFile(spec.run.metrics, engine.start)]
    if experiment.tracking.tensorboard:
        trackers.append(TensorBoard(spec.folder / "tensorboard", engine.start, log))
    return [*trackers, LossSpikes(spec.run.spikes, engine.start, log), wandb, *experiment.trackers()], wandb
