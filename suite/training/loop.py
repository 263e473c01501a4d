"""The training loop of one worker: load a batch, train, update, record, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Protocol

from suite.device import is_host, module_of
from suite.errors import NonFiniteError
from suite.exchange import all_gather
from suite.log import Log
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.runtime.nonfinite import NonFiniteRecord, find_nonfinite
from suite.settings import LoopSettings
from suite.training import metrics
from suite.training.fingerprints import Fingerprints
from suite.training.layer_stats import LayerStats
from suite.training.pace import Pace
from suite.training.profiling import StepProfiler
from suite.training.stage_optimizer import StageOptimizer, StepResult
from suite.training.system_metrics import peak_bytes
from suite.training.trace import TraceWriter
from suite.training.trackers import Tracker
from suite.training.utilization import Utilization
from suite.training.validation import Validation

MIN_MESSAGE_TIMEOUT_S, MESSAGE_TIMEOUT_STEPS = 60.0, 10.0
"""The longest wait for a message after the first step: ten steps, and at least 60 s. Longer than the supervisor
allows for one action (``suite.pipeline.runtime.worker_status``), so that the supervisor finds the cause before the
waiting workers fail."""

SAVE_TIMEOUT_S = 420.0
"""Longest save point: three waits of ``checkpoint.Saver`` for the previous save, and the copy."""

PEAK, ASK, BUSY_S, SIZE = range(4)
"""The numbers that each worker gives with its norms: bytes of its highest peak, what it asks for, and of the step
before the seconds in which it computed and the units of its share; 0 if unknown."""

LAST_SAVE_TIMEOUT_S = 4 * SAVE_TIMEOUT_S
"""The last save is tried ``checkpoint.writing.LIMIT`` times."""


class Ask(IntEnum):
    """What a worker asks all to do at the end of a step; the strongest is done."""

    NOTHING, SAVE, END = range(3)


class Saving(Protocol):
    """What the loop uses of ``checkpoint.Saver``. All workers make the same calls in the same order."""

    def on_step_end(self, step: int, applied: bool) -> None: ...
    def save(self, step: int, units: int, best: bool = False) -> None: ...
    def wait(self) -> None: ...
    def finish(self, step: int, units: int, best: bool = False) -> None: ...


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of one worker. ``batches`` returns its share of a step's mini-batch, or None if it needs none."""

    executor: Executor
    optimizer: StageOptimizer
    batches: Callable[[int], ReplicaBatch | None]
    saver: Saving
    trackers: Sequence[Tracker]
    """Empty on all workers but the metrics rank."""
    trace: TraceWriter | None = None
    unit: str = "tokens"
    """What ``ReplicaBatch.units`` counts."""
    metric_names: tuple[str, ...] = ("nll",)
    """Names of the metrics that the loss reports per unit, beside its objective."""
    layer_stats: LayerStats | None = None
    validation: Validation | None = None
    """None without held-out data."""
    log: Log = print
    """Prints a line for the user."""
    utilization: Utilization | None = None
    """On the metrics rank, if the model's operations are known."""
    profiler: StepProfiler | None = None
    fingerprints: Fingerprints | None = None
    pace: Pace | None = None
    """None: slow workers are not named."""
    asks: Callable[[], Ask] = lambda: Ask.NOTHING
    """Called in each step."""
    saves_last: bool = True
    """Whether the last step has a checkpoint, also where none is due."""


@dataclass
class Progress:
    """Progress of a run; a resumed run continues from it."""

    step: int = 0
    units: int = 0
    """Tokens, images or rows."""
    ended_early: bool = False
    """Whether a worker asked for the end."""


def train(worker: TrainingSetup, settings: LoopSettings, progress: Progress) -> Progress:
    """Trains from ``progress`` to ``settings.steps``, or until validations have not improved for too long, or a worker
    asks for the end.

    Raises NonFiniteError, on all workers in the same step, after more than ``max_nonfinite_steps`` steps in a row with
    non-finite numbers; StallError when a neighbour does not send in time; CheckpointError when checkpoints cannot be
    written.
    """
    nonfinite_steps, improved = 0, False
    for step in range(progress.step, settings.steps):
        if worker.validation is not None and worker.validation.stopped_early(step):
            break
        if worker.profiler is not None:
            worker.profiler.begin(step, worker.executor)
        with worker.fingerprints.recording(step) if worker.fingerprints is not None else nullcontext():
            batch, result, seconds, bubble = _train_step(worker, step)
        ask = Ask(int(max(numbers[ASK] for numbers in result.of_workers)))
        if worker.profiler is not None:
            worker.profiler.end(step, worker.executor)
        progress.step = step + 1
        nonfinite_steps = 0 if result.applied else nonfinite_steps + 1
        origin = "" if result.applied else _find_nonfinite(worker, batch, step, result)
        if batch is not None:
            progress.units += int(batch.units)
            if worker.trackers:
                with worker.executor.status.allow(MIN_MESSAGE_TIMEOUT_S):  # as long as others wait for a message
                    _record(worker, progress, batch, result, seconds, bubble)
        worker.saver.on_step_end(progress.step, result.applied)
        if nonfinite_steps > settings.max_nonfinite_steps:
            with _saving(worker, step):
                worker.saver.wait()
            raise NonFiniteError(
                f"{nonfinite_steps} steps in a row had non-finite numbers, {settings.max_nonfinite_steps} are allowed; "
                f"stopped at step {step + 1} without an update; {origin}. Lower optimizer.learning_rate and resume"
            )
        improved = _validate(worker, progress.step)
        progress.ended_early = ask == Ask.END
        is_left = worker.saves_last and (progress.ended_early or progress.step == settings.steps)  # to ``finish``
        if not is_left and (improved or ask or progress.step % settings.checkpoint_every == 0):
            with _saving(worker, step):
                worker.saver.save(progress.step, progress.units, improved)
        if progress.ended_early:
            break
    if worker.profiler is not None:
        worker.profiler.end(None, worker.executor)
    with _saving(worker, None, "the last checkpoint", LAST_SAVE_TIMEOUT_S):
        if worker.saves_last:
            worker.saver.finish(progress.step, progress.units, improved)
        else:
            worker.saver.wait()
    worker.executor.status.begin("end", None)
    return progress


def _train_step(worker: TrainingSetup, step: int) -> tuple[ReplicaBatch | None, StepResult, float, float | None]:
    """Returns the worker's share of the mini-batch, the step's result, its seconds, and if it is traced its bubble."""
    begin, status = time.perf_counter(), worker.executor.status
    status.begin("batch", step)
    traced = worker.trace.recorder(step) if worker.trace is not None else None
    recorder = worker.pace.recorder(step) if traced is None and worker.pace is not None else traced
    with status.allow(MIN_MESSAGE_TIMEOUT_S):
        batch = worker.batches(step)
    worker.executor.recorder = recorder
    with worker.layer_stats.recording(step) if worker.layer_stats is not None else nullcontext():
        sums = worker.executor.train(batch, step)
    status.begin("update", step)
    with status.waiting_for("the other workers' gradients and norms"):
        with worker.layer_stats.updating() if worker.layer_stats is not None else nullcontext():
            look = worker.pace.take() if worker.pace is not None else (0.0, 0.0)
            own = (peak_bytes(worker.executor.stage.device), worker.asks(), *look)
            result = worker.optimizer.update(sums, step, recorder, own)
        if worker.layer_stats is not None:
            worker.layer_stats.write(step, result.layer_norms)
    bubble = None
    if worker.pace is not None and recorder is not None:
        worker.pace.note(step, recorder, batch.share if batch is not None else 0.0)
    if worker.trace is not None and traced is not None:
        worker.trace.write(step, traced)
        with status.waiting_for("the other workers' traces"):
            bubble = worker.trace.bubble(traced)
    seconds = time.perf_counter() - begin
    status.message_timeout.seconds = max(MIN_MESSAGE_TIMEOUT_S, MESSAGE_TIMEOUT_STEPS * seconds)
    status.step_done(seconds)
    return batch, result, seconds, bubble


def _validate(worker: TrainingSetup, step: int) -> bool:
    """Validates if it is due after ``step`` steps, and records it; returns whether no validation before was better."""
    validation = worker.validation
    if validation is None or not validation.is_due(step):
        return False
    metrics, improved = validation.validate(step)
    with worker.executor.status.allow(MIN_MESSAGE_TIMEOUT_S):
        for tracker in worker.trackers:
            tracker.log(step, metrics)
    if worker.trackers and (reason := validation.stopped_early(step)):
        worker.log(reason)
    return improved


def _saving(
    worker: TrainingSetup, step: int | None, what: str = "the checkpoint", timeout_s: float = SAVE_TIMEOUT_S
) -> AbstractContextManager[None]:
    worker.executor.status.begin("save", step)
    return worker.executor.status.waiting_for(what, timeout_s)


def _find_nonfinite(worker: TrainingSetup, batch: ReplicaBatch | None, step: int, result: StepResult) -> str:
    """Reruns a non-finite step with hooks on every layer and returns the origin of the numbers. All workers call it."""
    worker.executor.recorder = None
    with find_nonfinite(worker.executor) as records:
        worker.executor.train(batch, step)
    worker.executor.status.begin("look", step)
    with worker.executor.status.waiting_for("the other workers' search for non-finite numbers"):
        worker.optimizer.forget()
        found = all_gather([asdict(record) for record in sorted(records)[:1]])
    first = min((NonFiniteRecord(**record) for records in found for record in records), default=None)
    if first is not None:
        origin = f"the first non-finite number was at {first}"
    else:
        culprits = [str(layer) for layer, norm in enumerate(result.layer_norms) if not math.isfinite(norm)]
        layers = ", ".join(culprits) or "none, the loss alone"
        origin = (
            "in a rerun, every output and gradient of each micro-batch was finite: a sum over them overflowed, or a "
            f"device made an error (layers with non-finite gradients: {layers})"
        )
    if worker.trackers:
        worker.log(f"step {step + 1} had non-finite numbers and was skipped; {origin}")
    return origin


def _record(
    worker: TrainingSetup,
    progress: Progress,
    batch: ReplicaBatch,
    result: StepResult,
    seconds: float,
    bubble: float | None,
) -> None:
    unit, coord, device = worker.unit, worker.executor.coord, worker.executor.stage.device
    peak = max(numbers[PEAK] for numbers in result.of_workers)
    values = {
        metrics.LOSS: result.objective / batch.divisor,
        **{
            metrics.train_metric(name): value / batch.divisor
            for name, value in zip(worker.metric_names, result.metrics, strict=True)
        },
        metrics.GRAD_NORM: result.grad_norm,
        metrics.LR: result.lr,
        metrics.APPLIED: float(result.applied),
        metrics.units_done(unit): float(progress.units),
        metrics.STEP_S: seconds,
        metrics.units_per_s(unit): batch.units / seconds,
        metrics.units_per_s_per_device(unit): batch.units / seconds / (coord.stages * coord.replicas),
        metrics.PEAK_GIB: peak / 2**30,
    }
    if not is_host(device):
        values[metrics.PEAK_SHARE] = peak / module_of(device).get_device_properties(device).total_memory
    if worker.utilization is not None:
        values |= worker.utilization.values(batch.units, seconds)
    if bubble is not None:
        values[metrics.BUBBLE] = bubble
    if worker.pace is not None:
        busy_s, sizes = ([numbers[at] for numbers in result.of_workers] for at in (BUSY_S, SIZE))
        values |= worker.pace.slow_workers(progress.step, busy_s, sizes)
    for tracker in worker.trackers:
        tracker.log(progress.step, values)
