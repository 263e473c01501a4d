"""The program of each of the K x R workers: builds its stage, trains, and writes its part of the run's record."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.base.data_source import DataSource
from experiments.base.experiment import Experiment
from experiments.custom.loading import Source, find_function
from launch.runs.checkpoints import checkpoint_location, note_published
from launch.runs.record import write_record
from launch.runs.store import RunFolder
from launch.worker.attempt import Attempt, run_logger
from launch.worker.build import PartitionedModel, make_executor, make_stage_optimizer
from launch.worker.distributed import MEET_S
from launch.worker.feed_processes import make_batches
from launch.worker.gpu_debug import leave_gpu_dumps
from launch.worker.heartbeat import HeartbeatWriter
from launch.worker.loading import begin_attempt, load_weights
from launch.worker.log_file import log_to
from launch.worker.peak import device_peak
from launch.worker.run_plan import RunPlan
from launch.worker.save_requests import SaveRequests
from launch.worker.wandb_identity import wandb_config, wandb_identity
from models.chunked_loss import set_logits_bytes
from suite.errors import EndedEarlyError, FailureLocation, ProgramError, StallError, SuiteError
from suite.exchange import all_gather, broadcast
from suite.log import Log
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.memory_tracker import keep_freed_memory
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.runtime.communication_errors import explain, summary
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.runtime.p2p import MessageTimeout
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.action import Action
from suite.training import checkpoint
from suite.training.fingerprints import Fingerprints
from suite.training.layer_stats import LayerStats
from suite.training.loop import Progress, TrainingSetup, train
from suite.training.pace import Pace
from suite.training.profiling import step_profiler
from suite.training.stage_optimizer import StageOptimizer
from suite.training.system_metrics import SystemMetrics, peak_bytes
from suite.training.trace import TraceWriter
from suite.training.trackers import MetricsFile, TensorBoard, Tracker
from suite.training.utilization import Utilization
from suite.training.validation import Validation, notes_of, state_of
from suite.training.wandb_run import Wandb

STALL_REPORT_DELAY_S = 2.0
"""Seconds that a worker waits before it reports a stall, so that the worker at fault reports first."""


def train_stage(
    experiment: Experiment, plan: RunPlan, attempt: Attempt, rank: int, join: Callable[[], object], node: str = ""
) -> None:
    """Runs one worker to the end of the job. ``join`` joins the default process group, once all workers have come.

    Raises the SuiteError that ends the run, the same on all workers that know it; ProgramError for any other exception.
    """
    coord, run = plan.coord(rank, experiment.pipeline), attempt.run
    log_to(run.log(coord.replica, coord.stage))
    status = WorkerStatus(MessageTimeout(plan.timeout_s), action_timeout_s=plan.timeout_s)
    folder = attempt.heartbeats
    with HeartbeatWriter(folder, coord, attempt.number, status, node) if folder else nullcontext():
        try:
            with status.waiting_for("the other workers to come", MEET_S):
                join()
            if attempt.hook:
                source = Source.parse(attempt.hook)
                find_function(source.place, source.function)(source.label, coord, attempt, status)
            torch.set_num_threads(experiment.train.threads or attempt.cores)
            keep_freed_memory()
            profiled = experiment.train.profile_steps is not None
            dumps = leave_gpu_dumps(run.gpu, coord, attempt.number, status, with_stacks=profiled)
            with dumps if attempt.use_gpu else nullcontext():
                device = torch.device("cuda", torch.cuda.current_device()) if attempt.use_gpu else torch.device("cpu")
                _Assembly(experiment, plan, attempt, coord, status, device).train()
        except Exception as error:
            with suppress(OSError):  # the log may be on a full disk
                if isinstance(error, EndedEarlyError):
                    raise
                traceback.print_exc()  # goes to this worker's log; the terminal shows one sentence
            reported = _as_reported_error(error, run, coord, status, plan.timeout_s)
            # NCCL may call it an internal error on one worker that another has failed
            if isinstance(reported, StallError) or (isinstance(reported, ProgramError) and "NCCL error" in str(error)):
                time.sleep(STALL_REPORT_DELAY_S)
            raise reported from error


def _as_reported_error(
    error: Exception, run: RunFolder, coord: RankCoord, status: WorkerStatus, timeout_s: float
) -> SuiteError:
    """Converts an exception to the error reported to the supervisor."""
    if isinstance(error, SuiteError):
        return error
    if isinstance(error, RuntimeError):
        explained = explain(error, f"the other workers ({coord})", timeout_s)
        if isinstance(explained, SuiteError):
            return explained
    action, layer = status.action, status.layer
    log_file, host = str(run.log(coord.replica, coord.stage)), socket.gethostname()
    where = FailureLocation(coord.replica, coord.stage, status.step, str(action), layer, host, log_file)
    place = str(action) + (f" of step {status.step + 1}" if status.step is not None else "")
    if isinstance(action, Action):
        place += f", micro-batch {action.micro_batch}"
    if layer is not None and status.stage is not None:
        place += f", in layer {layer} ({status.stage.types[layer]})"
    elif isinstance(action, Action) and action.kind in "IBW" and status.stage is not None:
        cell = status.stage.cells[action.virtual_stage]
        place += f", in one of layers {cell.start}-{cell.stop - 1}"
    error_type = type(error).__name__
    message = f"{coord} on {host}, {place}: {error_type}: {summary(error)}; its log is {log_file}"
    return ProgramError(message, error_type, where)


@dataclass(frozen=True)
class _Assembly:
    """What this worker is built from, and the parts that it trains with."""

    experiment: Experiment
    plan: RunPlan
    attempt: Attempt
    coord: RankCoord
    status: WorkerStatus
    device: torch.device

    @property
    def run(self) -> RunFolder:
        return self.attempt.run

    @property
    def log(self) -> Log:
        return run_logger(self.run.messages)

    def train(self) -> None:
        """Builds this worker, and trains to the end."""
        experiment, attempt, coord, settings = self.experiment, self.attempt, self.coord, self.experiment.train
        with self.status.waiting_for("the other workers' start", self.plan.timeout_s):
            layers, loss = experiment.build()
            set_logits_bytes(layers, self.plan.logits_bytes)
            cells = cell_ranges(self.plan.cells, len(layers))
            model = PartitionedModel(layers, loss, cells, self.plan.schedule_config)
            precision = experiment.optimizer.precision
            executor, groups = make_executor(coord, model, self.device, precision, settings.seed, self.status)
            loaded, vocabulary = load_weights(experiment, attempt, executor, groups, self.log)
            start, notes = (loaded.step, loaded.notes) if loaded is not None else (0, {})
            sync_stats, factors = getattr(settings, "sync_batchnorm_stats", True), experiment.update_factors
            optimizer = make_stage_optimizer(executor, groups, model, experiment.optimizer, sync_stats, factors)
            if loaded is not None:
                checkpoint.load_optimizer(loaded, optimizer)
            source = experiment.data_source(attempt.data, coord)
            if (warning := source.check(notes or vocabulary)) and coord.rank == 0:
                self.log(warning)
            utilization = self._utilization()
            begin_attempt(attempt, experiment, coord, start, self.log)
            self.status.first_step = start
            batches = make_batches(experiment, attempt.data, source, executor, start)
            validation = None if attempt.is_brief else self._validation(executor, source, loaded)
            # the trackers; the trace compares the clocks of all workers
            system_metrics = SystemMetrics(self.run.system, coord, attempt.number, self.status, self.device)
            trackers, wandb_run = self._trackers(start, notes, system_metrics)
            schedule_key = str((experiment.pipeline, self.plan.cells, self.plan.schedule_config))
            trace = TraceWriter(self.run.trace_folder, coord, self.device, start, experiment.trace, schedule_key)
            every, layers_file = settings.layer_stats_every, self.run.layers if coord.is_metrics_rank else None
            stored = {"name": experiment.name, "seed": settings.seed, "wandb_run": wandb_run} | source.notes()
            setup = TrainingSetup(
                executor=executor,
                optimizer=optimizer,
                batches=batches,
                saver=self._saver(optimizer, validation, stored, start),
                trackers=trackers,
                trace=trace,
                pace=Pace(coord, self.device, start, self.plan.busy_s, all_gather(socket.gethostname()), self.log),
                unit=experiment.unit,
                metric_names=experiment.metric_names,
                layer_stats=LayerStats(executor, every, start, layers_file) if every is not None else None,
                validation=validation,
                log=self.log,
                utilization=utilization,
                profiler=step_profiler(settings, self.run.profile, coord, self.device),
                fingerprints=self._fingerprints(executor, optimizer, start),
                asks=SaveRequests(attempt.heartbeats, settings.checkpoint_minutes if coord.rank == 0 else None),
                saves_last=not attempt.is_brief,
            )
        with system_metrics:
            progress = train(setup, settings, Progress(start, int(notes.get("units", 0))))
        batches.close()
        if progress.ended_early:
            with self.status.waiting_for("the other workers' last save", self.plan.timeout_s):
                dist.barrier()  # no worker is ended before all have saved
            raise EndedEarlyError(f"ended early, saved after step {progress.step}")
        with self.status.waiting_for("the end of the run", self.plan.timeout_s):
            self._finish(layers, setup, source, progress, system_metrics, wandb_run)

    def _validation(
        self, executor: Executor, source: DataSource, loaded: checkpoint.Checkpoint | None
    ) -> Validation | None:
        """Returns the validation on held-out data; None without such data."""
        if not source.has_held_out:
            return None
        state = state_of(loaded.notes if loaded is not None else {})
        names, criterion = self.experiment.metric_names, self.experiment.criterion
        validation = Validation(executor, source.held_out, names, criterion, self.experiment.train, state)
        if loaded is not None and state.best_step is not None and state.best_step != loaded.best_step:
            validation.forget(state.best_step)  # its checkpoint is gone, so a new best one is needed
        return validation

    def _trackers(
        self, start: int, notes: dict[str, Any], system_metrics: SystemMetrics
    ) -> tuple[list[Tracker], str | None]:
        """Returns the trackers, of which all workers but the metrics rank have none, and the id of the run in wandb."""
        trackers: list[Tracker] = []
        run_id = None
        if self.coord.is_metrics_rank:
            run, tracking = self.run, self.experiment.tracking
            identity = wandb_identity(run, self.experiment, self.plan.schedule_config, notes.get("wandb_run"))
            config = wandb_config(self.experiment, self.plan)
            wandb = Wandb(run.path, tracking, identity, config, self.log, system_metrics.latest)
            trackers.append(MetricsFile(run.metrics, start))
            if tracking.tensorboard:
                trackers.append(TensorBoard(run.path / "tensorboard", start, self.log))
            trackers += [wandb, *self.experiment.trackers()]
            run_id = wandb.run_id
        # rank 0 writes it to the manifest
        return trackers, broadcast(run_id, self.coord.rank_of(0, self.coord.placement.loss_stage))

    def _fingerprints(self, executor: Executor, optimizer: StageOptimizer, start: int) -> Fingerprints | None:
        steps, pipeline = self.experiment.train.fingerprint_steps, self.experiment.pipeline
        micro_batches = pipeline.micro_batches * pipeline.replicas
        return Fingerprints(executor, optimizer, self.run.fingerprints, start, steps, micro_batches) if steps else None

    def _utilization(self) -> Utilization | None:
        """Returns what computes MFU and HFU, on the metrics rank."""
        if self.plan.flops is None or not self.coord.is_metrics_rank:
            return None
        peak = device_peak(self.device, self.experiment.optimizer.precision, self.attempt.costs)
        return Utilization(self.plan.flops, peak, self.attempt.workers)

    def _saver(
        self, optimizer: StageOptimizer, validation: Validation | None, stored: dict[str, Any], start: int
    ) -> checkpoint.Saver:
        return checkpoint.Saver(
            checkpoint.Storage(checkpoint_location(self.run, self.experiment)),
            optimizer,
            lambda units: {"units": units} | notes_of(validation) | stored,
            self.log,
            start,
            on_failure=validation.forget if validation is not None else lambda step: None,
            owner=self.attempt.owner_of_attempt,
            on_published=partial(note_published, self.run),
            on_progress=lambda: self.status.begin("save", self.status.step),  # its time begins anew
        )

    def _finish(
        self,
        layers: list[nn.Module],
        setup: TrainingSetup,
        source: DataSource,
        progress: Progress,
        system_metrics: SystemMetrics,
        wandb_run: str | None,
    ) -> None:
        """Records the results of the run. All workers must call it."""
        if setup.validation is not None:
            setup.validation.figures(progress.step)  # those of the last step, already known unless it resumed
        memory = all_gather(peak_bytes(self.device))
        if self.coord.is_metrics_rank:
            record = write_record(self.run, self.experiment, layers, setup, source, progress, memory, wandb_run)
        dist.barrier()
        if self.coord.is_metrics_rank:
            system_metrics.sample()
            for tracker in setup.trackers:
                tracker.finish(record)
