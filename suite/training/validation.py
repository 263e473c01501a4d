"""Validation: held-out data through the forward-only schedule, during training and at its end.

    step ... 20  validate: better, save | ... 40  validate: better, save | ... 60  worse | ... 80  worse: stop
                                                       the best checkpoint                   train.patience=2

The figures are sums over mini-batches in a fixed order, in fp64, so they are equal on all workers and depend neither on
K nor on which replica evaluates which mini-batch. All decisions follow from the figures and from ``ValidationState``,
which every checkpoint holds: a resumed run repeats them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from suite.device import fork_rng
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.runtime.executor import Executor
from suite.settings import LoopSettings

READ_TIMEOUT_S = 300.0
"""Longest that a stage reads held-out data while the others wait."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out mini-batches, the same number on all workers; None on stages that need none."""

    batches: Sequence[ReplicaBatch | None]
    groups: tuple[str, ...] = ()
    """Names of the groups of their micro-batches, such as languages; empty for one figure."""


@dataclass(frozen=True)
class Criterion:
    """The figure that decides which validation is the best: ``loss``, or the metric by its name."""

    name: str
    higher_is_better: bool = False

    def improves(self, value: float, best: float | None) -> bool:
        """Whether ``value`` is better than the best so far. NaN and infinity never are."""
        if not math.isfinite(value):
            return False
        return best is None or (value > best if self.higher_is_better else value < best)


@dataclass(frozen=True)
class ValidationState:
    """What a resumed run must know of the validations before; in the notes of every checkpoint."""

    best: float | None = None
    """The criterion's best value; None before the first validation."""
    best_step: int | None = None
    unimproved: int = 0
    """Validations since then."""


_STATE = TypeAdapter(ValidationState)


def state_of(notes: dict[str, object]) -> ValidationState:
    """Returns the state in a checkpoint's notes; the initial one for a run without validation."""
    return _STATE.validate_python(notes.get("validation", {}))


def notes_of(validation: Validation | None) -> dict[str, object]:
    """Returns the state for a checkpoint's notes; nothing before the first validation."""
    if validation is None or validation.state == ValidationState():
        return {}
    return {"validation": asdict(validation.state)}


@dataclass(frozen=True)
class Figures:
    """Means per unit over held-out data, such as the NLL per token in nats; equal on all workers."""

    loss: float
    metrics: tuple[float, ...]
    groups: dict[str, float]
    """The first metric of each group."""
    weights: dict[str, float]
    """The units of each group, such as tokens: the first metric is the mean of the groups' with these weights."""


def evaluate(executor: Executor, held_out: HeldOut, step: int) -> Figures:
    """Evaluates mini-batches, each on one replica in turn. All workers must call it, after ``step`` steps."""
    coord, status = executor.coord, executor.status
    rows = {name: at for at, name in enumerate(held_out.groups or ("",))}
    sums = torch.zeros(len(held_out.batches), len(rows), 2 + executor.metric_count, dtype=torch.float64)
    executor.recorder = None
    for at in range(coord.replica, len(held_out.batches), coord.replicas):
        status.begin("validate", step - 1)
        with status.allow(READ_TIMEOUT_S):
            batch = held_out.batches[at]
        parts = executor.evaluate(batch)
        if not coord.has_loss:
            continue
        assert batch is not None
        for (name, _), part in zip(batch.groups or [("", 0.0)] * len(parts), parts, strict=True):
            sums[at, rows[name], :-1] += torch.tensor([part.objective, *part.metrics], dtype=torch.float64)
        for name, weight in batch.groups or [("", batch.divisor)]:
            sums[at, rows[name], -1] += weight
    sums = sums.to(executor.stage.device, non_blocking=True)
    status.begin("validate", step - 1)
    with status.waiting_for("the other workers' validation", status.message_timeout.seconds):
        dist.all_reduce(sums)  # exact: of each entry all workers but one have zero
    by_group = sums.cpu().sum(0)
    loss, *metrics, weight = by_group.sum(0).tolist()
    groups = {name: float(by_group[rows[name], 1] / by_group[rows[name], -1]) for name in held_out.groups}
    weights = {name: float(by_group[rows[name], -1]) for name in held_out.groups}
    return Figures(loss / weight, tuple(metric / weight for metric in metrics), groups, weights)


class Validation:
    """The validations of one worker's run. All workers make the same calls in the same order."""

    def __init__(
        self,
        executor: Executor,
        read: Callable[[], HeldOut],
        metric_names: Sequence[str],
        criterion: Criterion,
        settings: LoopSettings,
        state: ValidationState,
    ) -> None:
        """``read`` returns the held-out data. It is called once, before the first validation. The criterion is the loss
        or the first metric."""
        self._executor, self._read, self._metric_names = executor, read, metric_names
        self._settings, self.criterion, self.state = settings, criterion, state
        self._bests = [state] if state.best is not None else []
        """Whenever a validation was the best so far; the last one's checkpoint is the best."""
        self._held_out: HeldOut | None = None
        self._last: tuple[int, Figures] | None = None

    @property
    def held_out(self) -> HeldOut:
        """The held-out data. All workers must read it together."""
        if self._held_out is None:
            status = self._executor.status
            status.begin("validate", None)
            with status.waiting_for("the held-out data", READ_TIMEOUT_S):
                self._held_out = self._read()
        return self._held_out

    def is_due(self, step: int) -> bool:
        """Whether to validate after ``step`` steps: every ``train.validate_every``, and at the end."""
        every = self._settings.validate_every
        return step == self._settings.steps or (every is not None and step % every == 0)

    def validate(self, step: int) -> tuple[dict[str, float], bool]:
        """Validates after ``step`` steps; returns the metrics to record, and whether no validation was better before.

        Without ``train.validate_every`` none counts as the best: then the last checkpoint is the one to use.
        """
        start, before = time.perf_counter(), self.state
        figures = self.figures(step)
        value = figures.loss if self.criterion.name == "loss" else figures.metrics[0]
        improved = self._settings.validate_every is not None and self.criterion.improves(value, before.best)
        if improved:
            self.state = ValidationState(value, step, 0)
            self._bests.append(self.state)
        elif self._settings.validate_every is not None:
            self.state = ValidationState(before.best, before.best_step, before.unimproved + 1)
        metrics = {f"valid/{self.criterion.name}": value}
        metrics |= {f"valid/{name}": value for name, value in zip(self._metric_names, figures.metrics, strict=True)}
        metrics |= {f"valid/{self._metric_names[0]}/{name}": metric for name, metric in figures.groups.items()}
        return metrics | {"valid/seconds": time.perf_counter() - start}, improved

    def forget(self, step: int) -> None:
        """Takes back that the validation after ``step`` steps was the best, because its checkpoint was not written: the
        best is the one before, whose checkpoint is still kept. ``patience`` counts on."""
        self._bests = [best for best in self._bests if best.best_step != step]
        if self.state.best_step == step:
            last = self._bests[-1] if self._bests else ValidationState()
            self.state = ValidationState(last.best, last.best_step, self.state.unimproved)

    def figures(self, step: int) -> Figures:
        """Returns the figures after ``step`` steps; evaluates only if they are not those of the last validation."""
        if self._last is None or self._last[0] != step:
            with fork_rng(self._executor.stage.device):
                self._last = step, evaluate(self._executor, self.held_out, step)
        return self._last[1]

    def stopped_early(self, step: int) -> str:
        """Returns why the run ends after ``step`` steps though it has more; empty if it goes on."""
        patience, state = self._settings.patience, self.state
        if patience is None or state.unimproved < patience or step >= self._settings.steps:
            return ""
        best = "none was finite"
        if state.best is not None:
            best = f"the best was {self.criterion.name} {state.best:.4f} at step {state.best_step}"
        many = f"{state.unimproved} validations in a row" if state.unimproved > 1 else "the last validation"
        return f"stopped early after {step} of {self._settings.steps} steps: {many} did not improve; {best}"
