"""What a run's folder says: its experiment, plan, metrics, validations, attempts, scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file, read_settings
from launch.runs.store import RunFolder
from launch.watching.run_state import RunState, damage, read_state
from suite.errors import RunFileError, SettingError
from suite.paths import read_json
from suite.training.jsonl import last_line, read_lines
from suite.training.metrics import LOSS, STEP, STEP_S, History, every_step, own_metrics, read_history


class RunData:
    """A run. Each of its files is read when it is first asked for, and once; a damaged one raises RunFileError."""

    def __init__(self, run: RunFolder, holds_lock: bool = False) -> None:
        """``holds_lock`` is whether the caller holds the run's lock."""
        self.run, self.name, self._holds_lock = run, run.name, holds_lock

    @cached_property
    def experiment(self) -> Experiment:
        return read_experiment_file(self.run.experiment)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What ``experiment.toml`` says, of any task; empty if it is damaged, because the rest can still be shown."""
        try:
            return read_settings(self.run.experiment)
        except RunFileError:
            return {}

    @cached_property
    def state(self) -> RunState:
        return read_state(self.run, self._holds_lock)

    @cached_property
    def damage(self) -> str:
        """Which of its small files is damaged, and why; empty without one."""
        return damage(self.run)

    @cached_property
    def history(self) -> History:
        """The metrics of its steps and validations, of a long run of a part of them."""
        return read_history(self.run.metrics)

    @cached_property
    def last_step(self) -> dict[str, Any]:
        """The metrics of the last step, from the end of the file; empty before the first."""
        return last_line(self.run.metrics, LOSS) or {}

    @cached_property
    def record(self) -> dict[str, Any]:
        """Its results; empty while it trains."""
        record = read_json(self.run.record) or {}
        return record if record.get("steps", 0) >= int(self.history.steps[-1][STEP]) else {}  # or it was resumed since

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan of its last command."""
        return read_json(self.run.plan_json) or {}

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return self.state.attempts

    def steps_as_planned(self, step_s: float | None = None) -> list[dict[str, Any]]:
        """Returns the steps of attempts with the plan whose step takes ``step_s``, by default that in its folder."""
        wanted = self.plan.get("step_s") if step_s is None else step_s
        begins = [(each["start"], each.get("planned_step_s", wanted)) for each in self.attempts if "start" in each]
        planned = ((step, [at_s for start, at_s in begins if start < step[STEP]]) for step in self.history.steps)
        return [step for step, known in planned if known[-1:] in ([], [wanted])]

    @cached_property
    def wall_s(self) -> dict[str, float]:
        """Seconds of its commands and attempts, by what they did."""
        lines, validations = read_lines(self.run.attempts), self.history.validations
        step_s = {line[STEP]: line[STEP_S] for line in every_step(self.run.metrics) if STEP_S in line}
        first_steps_s = sum(step_s.get(line["start"] + 1, 0.0) for line in lines if "first_step_s" in line)
        data_s, planning_s, first_s = (_sum(lines, name) for name in ("data_s", "planning_s", "first_step_s"))
        if not first_s:
            return {}
        parts = {"start of the workers": max(0.0, first_s - first_steps_s), "training": sum(step_s.values())}
        parts |= {"validation": _sum(validations, "valid/seconds")}
        whole_s = sum(each["ended"] - each["began"] for each in self.attempts if "ended" in each)
        others = {"saving and other work": max(0.0, whole_s - sum(parts.values()))}
        return {"data": data_s, "planning": planning_s, **parts, **others}

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Empty before ``make score``."""
        return read_json(self.run.scores) or {}

    @property
    def metric(self) -> str:
        """The metric of a validation: nll, accuracy."""
        return self.record.get("measure") or self.experiment.metric_of(self.history.steps[-1])

    @property
    def metrics(self) -> list[str]:
        """What its validations may have: what decides the best one, and the loss's own metrics."""
        own = own_metrics(self.history.steps[-1], self.experiment.unit)
        return list(dict.fromkeys([self.experiment.criterion.name, self.metric, *own]))

    @property
    def scale(self) -> str:
        """Empty for a run of one's own, which has none."""
        return "" if "source" in self.settings else str(self.settings.get("scale", "?"))

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Returns (step, value) of a metric of the steps, without steps that have no finite value."""
        pairs = ((line.get(STEP), line.get(metric)) for line in self.history.steps)
        return [(x, y) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]

    def valid_points(self, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) of a metric of the validations, such as ``nll``. The final one is the record's if there
        is no other."""
        metric = f"valid/{name}"
        lines = self.history.validations
        values = {int(line["step"]): line[metric] for line in lines if line.get(metric) is not None}
        final = self.record.get(f"valid_{name}")
        if final is not None:
            values.setdefault(int(self.record["steps"]), final)
        return [(step, values[step]) for step in sorted(values)]

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """The step with the best validation, and the value of the criterion there; None with fewer than two."""
        criterion, best_step = self.experiment.criterion, self.record.get("best_step")
        points = {int(step): value for step, value in self.valid_points(criterion.name)}
        if not self.record and self.experiment.train.validate_every is not None:  # it still trains
            for step, value in points.items():
                before = None if best_step is None else points.get(best_step)
                best_step = step if criterion.improves(value, before) else best_step
        return (best_step, points[best_step]) if best_step in points and len(points) > 1 else None

    @property
    def languages(self) -> list[str]:
        """Languages that validations list separately."""
        prefix = f"valid/{self.metric}/"
        names = {name for line in self.history.validations for name in line}
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _sum(lines: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(line.get(name, 0.0)) for line in lines)


def read_run(run: RunFolder, holds_lock: bool = False) -> RunData:
    """Reads a run. ``holds_lock`` is whether the caller holds its lock.

    Raises SettingError for a run without a finished step or of another version, RunFileError for one with a damaged
    file.
    """
    data = RunData(run, holds_lock)
    _ = data.experiment
    if not data.history.steps:
        raise SettingError(
            f"run {run.name} has not finished a step, so there is nothing to report; its logs are in "
            f"{run.path / 'logs'}"
        )
    _ = data.record, data.state, data.plan, data.scores
    return data
