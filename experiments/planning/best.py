"""The fastest settings of a run on given devices: stages, replicas, micro-batches, schedule and recomputes together.

    K x R on the devices -> with 1F1B, M as a plan chooses it -> the fastest few with all schedules -> two are searched

    6 devices     K   1 2 3 6        of the shapes on 6 devices only these: with 5 x 1 or 2 x 2 some would be idle
                  R   6 3 2 1

The mini-batch and the model stay, and the settings that are given. At first 1F1B stands for all schedules: it needs
little memory, and no other is far from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from experiments.base import overrides
from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.planning.plan_report import CostModel, PlanReport
from experiments.planning.planner import compared, try_plan
from suite.errors import PlanError
from suite.log import Log
from suite.settings import AUTO

SHOWN = 6
"""Plans with all schedules, the best one among them."""

SEARCHED = 2
"""Plans whose schedule is also searched."""

_BY_THE_FILE = ("stages", "micro_batches", "schedule", "virtual_stages")
"""What a schedule from a file determines."""


def best_plans(
    work: Experiment, cluster: Cluster, cost_model: CostModel, given: str, log: Log = lambda text: None
) -> list[PlanReport]:
    """Returns plans of a run, the fastest first, each with another K and R. The settings that are ``given`` stay.

    Raises PlanError, with the faults of the shape that has the most stages, when none fits.
    """
    fixed = {path.removeprefix("pipeline.") for path in overrides.parse(given, type(work)) if "pipeline." in path}
    fixed.update(_BY_THE_FILE if work.pipeline.schedule_rows else ())
    fixed.update(("stages",) if "layers_per_cell" in fixed else ())
    free = _with(work, fixed, micro_batches=AUTO, remat="auto", layers_per_cell=None, virtual_stages=1)
    shapes = [_with(free, (), stages=k, replicas=r) for k, r in _shapes(free, cluster, fixed)]
    first_try = "auto" if "virtual_stages" in fixed else "1f1b"
    tried = _fitting([_with(shape, fixed, schedule=first_try) for shape in shapes], cluster, cost_model, log)
    exact = [_with(report.experiment, fixed, schedule="auto") for report in tried[:SHOWN]]
    plans = _fitting(exact, cluster, cost_model, log)
    searched = [compared(report, log) for report in plans[:SEARCHED]]
    return sorted([*searched, *plans[SEARCHED:]], key=lambda report: report.step_s)


def _with(work: Experiment, fixed: Collection[str], **changes: Any) -> Experiment:
    """Returns the run with these settings of its pipeline, but for those that are fixed."""
    update = {name: value for name, value in changes.items() if name not in fixed}
    return work.with_pipeline(work.pipeline.model_copy(update=update))


def _shapes(work: Experiment, cluster: Cluster, fixed: Collection[str]) -> list[tuple[int, int]]:
    """Returns K and R of the shapes that no other exceeds, the fewest stages first."""
    pipeline, layers = work.pipeline, len(work.build()[0])
    stages = [pipeline.stages] if "stages" in fixed else range(1, min(layers, cluster.devices) + 1)
    replicas = [pipeline.replicas] if "replicas" in fixed else range(1, min(work.min_rows, cluster.devices) + 1)
    shapes = [(k, r) for k in stages for r in replicas if k * r <= cluster.devices]
    if not shapes:  # its plan says what is missing
        return [(pipeline.stages, pipeline.replicas)]
    return [(k, r) for k, r in shapes if not any(a >= k and b >= r and (a, b) != (k, r) for a, b in shapes)]


def _fitting(works: Sequence[Experiment], cluster: Cluster, cost_model: CostModel, log: Log) -> list[PlanReport]:
    """Returns the plans that fit, the fastest first. Raises the last fault if there is none."""
    plans, fault = [], None
    for work in works:
        pipeline = work.pipeline
        log(f"plans of K = {pipeline.stages}, R = {pipeline.replicas}, {pipeline.schedule}")
        try:
            plans.append(try_plan(work, cluster, cost_model))
        except PlanError as error:
            fault = error
    if not plans and fault is not None:
        raise fault
    return sorted(plans, key=lambda report: report.step_s)


def settings_of(report: PlanReport, work: Experiment) -> str:
    """Returns the pipeline settings with which another experiment has this plan."""
    wanted, before = report.plan.pipeline, work.pipeline
    if wanted.schedule == "search":  # it is searched again, and found again
        wanted = report.experiment.pipeline
    names = ("stages", "replicas", "micro_batches", "schedule", "virtual_stages", "remat", "layers_per_cell")
    changes = {name: getattr(wanted, name) for name in names if getattr(wanted, name) != getattr(before, name)}
    return " ".join(f"pipeline.{name}={'none' if value is None else value}" for name, value in changes.items())
