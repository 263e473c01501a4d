"""What a run has recorded: its experiment, plan, metrics, validations, attempts, scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from launch.runs.store import RUNS, RunFolder
from launch.watching.run_state import RunState, read_state
from suite.errors import SettingError
from suite.paths import read_json
from suite.training.metrics import STEP, read_history


@dataclass(frozen=True)
class RunData:
    """One run, read once."""

    run: RunFolder
    experiment: Experiment
    state: RunState
    steps: Sequence[dict[str, Any]]
    """The metrics of each step, of a long run of a part of them (``suite.training.metrics.read_history``)."""
    validations: Sequence[dict[str, Any]]
    """The metrics of each validation."""
    record: dict[str, Any]
    """Empty while the run trains."""
    plan: dict[str, Any]
    scores: dict[str, Any]
    """Empty before ``make score``."""

    @property
    def name(self) -> str:
        """Its name and id, such as t12_400m/20261122-234121."""
        return run_name(self.run)

    @property
    def unit(self) -> str:
        """What a mini-batch counts: tokens, images."""
        return self.experiment.unit

    @property
    def metric(self) -> str:
        """The metric of a validation: nll, accuracy."""
        return self.record.get("measure") or self.experiment.metric_of(self.steps[-1])

    @property
    def criterion(self) -> str:
        """The name of what decides which validation is the best: nll, accuracy, loss."""
        return self.experiment.criterion.name

    def points(self, metric: str, against: str = STEP) -> list[tuple[float, float]]:
        """Returns (step, value) of a metric of the steps, without steps that have no finite value. ``against`` is
        another metric to take in place of the step."""
        return [
            (line[against], line[metric])
            for line in self.steps
            if line.get(metric) is not None and line.get(against) is not None
        ]

    def valid_points(self, name: str, against: str = STEP) -> list[tuple[float, float]]:
        """Returns (step, value) of a metric of the validations, such as ``nll``; ``against`` is a metric of the steps
        to take in place of the step. The final one is the record's if there is no other."""
        metric = f"valid/{name}"
        values = {int(line["step"]): line[metric] for line in self.validations if line.get(metric) is not None}
        final = self.record.get(f"valid_{name}")
        if final is not None:
            values.setdefault(int(self.record["steps"]), final)
        at = {int(line["step"]): line.get(against) for line in self.steps}
        if against == STEP:
            return [(step, values[step]) for step in sorted(values)]
        return [(place, values[step]) for step in sorted(values) if (place := at.get(step)) is not None]

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """The step with the best validation, and the value of ``criterion`` there; None with fewer than two."""
        points = {int(step): value for step, value in self.valid_points(self.criterion)}
        if len(points) < 2:
            return None
        step = self.record.get("best_step") if self.record else self._best_step()
        return (step, points[step]) if step in points else None

    def _best_step(self) -> int | None:
        """Returns the best step so far, of a run that still trains; without ``train.validate_every`` none is marked."""
        if self.experiment.train.validate_every is None:
            return None
        criterion, best_step, best = self.experiment.criterion, None, None
        for line in self.validations:
            value = line.get(f"valid/{criterion.name}")
            if value is not None and criterion.improves(value, best):
                best_step, best = int(line[STEP]), value
        return best_step

    @property
    def languages(self) -> list[str]:
        """Languages that validations list separately."""
        prefix = f"valid/{self.metric}/"
        return sorted(
            {name.removeprefix(prefix) for line in self.validations for name in line if name.startswith(prefix)}
        )


def read_run(run: RunFolder, holds_lock: bool = False) -> RunData:
    """Reads a run. ``holds_lock`` is whether the caller holds its lock.

    Raises SettingError for a run without a finished step, and for one of an older version; RunFileError for one with a
    damaged file.
    """
    experiment = read_experiment_file(run.experiment)
    history = read_history(run.metrics)
    steps = history.steps
    if not steps:
        raise SettingError(
            f"run {run_name(run)} has not finished a step, so there is nothing to report; its logs are in "
            f"{run.path / 'logs'}"
        )
    record = read_json(run.record) or {}
    if record.get("steps", 0) < int(steps[-1][STEP]):
        record = {}  # of before it was resumed to train longer
    return RunData(
        run,
        experiment,
        read_state(run, holds_lock),
        steps,
        history.validations,
        record,
        read_json(run.plan_record) or {},
        read_json(run.scores) or {},
    )


def run_name(run: RunFolder) -> str:
    """Returns a run's name and id, or its folder if it is not below the folder of all runs."""
    name = os.path.relpath(run.path, RUNS.resolve())
    return str(run.path) if name.startswith("..") else name
