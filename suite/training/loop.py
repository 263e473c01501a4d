"""The training loop of one worker: batches in, updates out, records on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from suite.errors import NumbersError
from suite.pipeline.doing import FIRST_PATIENCE
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.step import Executor
from suite.pipeline.transport import Deadline
from suite.pipeline.watch import watching
from suite.settings import LoopSettings
from suite.training.optimizer import Outcome, StageOptimizer
from suite.training.sharpness import Sharpness
from suite.training.trace import TraceWriter
from suite.training.trackers import Tracker

FIRST_DEADLINE = FIRST_PATIENCE
"""Seconds any wait may last before a step's length is known."""

SHORTEST_DEADLINE, STEPS_A_DEADLINE = 60.0, 10.0
"""Afterwards. Longer than what the supervisor allows one action (``suite.pipeline.doing``): who waits too long is not
the cause, and is to be found waiting when the cause is named."""

SAVE_PATIENCE = 420.0
"""Seconds that a save point may take: three waits of ``checkpoint.Saver`` for the save before, and the copy."""

LAST_SAVE_PATIENCE = 4 * SAVE_PATIENCE
"""The last one is tried again: ``checkpoint.writing.LIMIT`` times."""


class Saving(Protocol):
    """What the loop asks of ``checkpoint.Saver``. All workers call all of it, in the same order."""

    def stepped(self, step: int, applied: bool) -> None:
        """Hears that ``step`` steps are done, and whether the last one updated the weights."""

    def save(self, step: int, units: int) -> None:
        """Begins to save the state after ``step`` steps."""

    def settle(self) -> None:
        """Waits for the save under way."""

    def finish(self, step: int, units: int) -> None:
        """Returns once the state after the last step is saved."""


@dataclass(frozen=True)
class Worker:
    """One worker's parts. ``batches`` gives its share of a step's mini-batch; None where none is needed."""

    executor: Executor
    optimizer: StageOptimizer
    deadline: Deadline
    batches: Callable[[int], MiniBatch | None]
    saver: Saving | None
    """None where nothing is to be saved."""
    trackers: Sequence[Tracker]
    """Empty on all workers but the one that speaks."""
    trace: TraceWriter | None = None
    unit: str = "tokens"
    """What a mini-batch's weight counts."""
    measure: str = "nll"
    """What the loss reports beside its objective, for each unit."""
    sharpness: Sharpness | None = None
    say: Callable[[str], None] = print
    """Tells the person who watches the run."""


@dataclass
class Progress:
    """Where a run stands; what a resumed run takes up again."""

    step: int = 0
    units: int = 0
    """Tokens, or images."""
    seconds: float = 0.0


def train(worker: Worker, settings: LoopSettings, progress: Progress) -> Progress:
    """Trains from ``progress`` to ``settings.steps``.

    Raises NumbersError after more than ``bad_steps_allowed`` steps in a row with non-finite numbers, on all workers in
    the same step, StallError when a neighbour does not deliver in time, and CheckpointError when checkpoints cannot be
    written.
    """
    bad, doing = 0, worker.executor.doing
    for step in range(progress.step, settings.steps):
        begin = time.perf_counter()
        doing.turn("batch", step)
        recorder = worker.trace.recorder(step) if worker.trace is not None else None
        with doing.takes(SHORTEST_DEADLINE):
            batch = worker.batches(step)
        worker.executor.recorder = recorder
        with worker.sharpness.looking(step) if worker.sharpness is not None else nullcontext():
            sums = worker.executor.train(batch, step)
        doing.turn("update", step)
        with doing.waits("the other workers' gradients and norms"):
            outcome = worker.optimizer.update(sums, step, recorder)
            if worker.sharpness is not None:
                worker.sharpness.note(step, outcome.norms)
        if worker.trace is not None and recorder is not None:
            worker.trace.write(step, recorder)
        seconds = time.perf_counter() - begin
        worker.deadline.seconds = max(SHORTEST_DEADLINE, STEPS_A_DEADLINE * seconds)
        doing.stepped(seconds)
        progress.step, progress.seconds = step + 1, progress.seconds + seconds
        bad = 0 if outcome.applied else bad + 1
        origin = "" if outcome.applied else _origin(worker, batch, step, outcome)
        if batch is not None:
            progress.units += int(batch.weight)
            _record(worker, progress, outcome, batch.weight, seconds)
        if worker.saver is not None:
            worker.saver.stepped(progress.step, outcome.applied)
        if bad > settings.bad_steps_allowed:
            if worker.saver is not None:
                doing.turn("save", step)
                with doing.waits("the checkpoint", SAVE_PATIENCE):
                    worker.saver.settle()
            raise NumbersError(
                f"{bad} steps in a row had non-finite numbers, {settings.bad_steps_allowed} are allowed; stopped at "
                f"step {step + 1} without an update; {origin}. Lower optimizer.learning_rate and resume"
            )
        if worker.saver is not None and progress.step % settings.checkpoint_every == 0:
            doing.turn("save", step)
            with doing.waits("the checkpoint", SAVE_PATIENCE):
                worker.saver.save(progress.step, progress.units)
    if worker.saver is not None:
        doing.turn("save", None)
        with doing.waits("the last checkpoint", LAST_SAVE_PATIENCE):
            worker.saver.finish(progress.step, progress.units)
    doing.turn("end", None)
    return progress


def _origin(worker: Worker, batch: MiniBatch | None, step: int, outcome: Outcome) -> str:
    """Walks a step with bad numbers again, every layer watched, and says where they came from; all workers call it."""
    worker.executor.recorder = None
    with watching(worker.executor) as seen:
        worker.executor.train(batch, step)
    everybodys: list[Any] = [None] * dist.get_world_size()
    worker.executor.doing.turn("look", step)
    with worker.executor.doing.waits("what the other workers saw of the bad numbers"):
        worker.optimizer.forget()
        dist.all_gather_object(everybodys, min(seen, default=None))
    found = min((one for one in everybodys if one is not None), default=None)
    if found is not None:
        told = f"the first bad number was at {found}"
    else:
        layers = ", ".join(map(str, outcome.culprits)) or "none, the loss alone"
        told = (
            "walked again, no output and no gradient of a micro-batch was bad: a sum of them overflowed, or a device "
            f"erred (layers with non-finite gradients: {layers})"
        )
    if worker.trackers:
        worker.say(f"step {step + 1} had non-finite numbers and was left out; {told}")
    return told


def evaluate(executor: Executor, batches: Sequence[MiniBatch | None]) -> float:
    """Returns the mean measure a unit over mini-batches, as the NLL of a token in nats; the same on all workers.

    Every replica walks the same batches; each needs only its own pipeline.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        sums = executor.evaluate(batch)
        if executor.place.last and batch is not None:
            total += torch.tensor([sums.measure, batch.weight], dtype=torch.float64)
    device = executor.stage.device
    total = total.to(device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _record(worker: Worker, progress: Progress, outcome: Outcome, weight: float, seconds: float) -> None:
    values = {
        "loss": outcome.objective / weight,
        worker.measure: outcome.measure / weight,
        "norm": outcome.norm,
        "rate": outcome.rate,
        "applied": float(outcome.applied),
        worker.unit: float(progress.units),
        "seconds": seconds,
        f"{worker.unit}_per_second": weight / seconds,
    }
    for tracker in worker.trackers:
        tracker.log(progress.step, values)
