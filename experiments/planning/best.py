"""The fastest settings of a run on given devices: stages, replicas, micro-batches, schedule and recomputes together.

    K x R on the devices -> with 1F1B, M as a plan chooses it -> the fastest few with all schedules -> two are searched

    6 devices     K   1 2 3 6        shapes to which neither a stage nor a replica can be added; if none of them fits,
                  R   6 3 2 1        those with one replica; on CPUs also one worker, whose threads have all cores

The mini-batch and the model stay, and the settings that are given. At first 1F1B stands for all schedules: it needs
little memory, and no other is far from it.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from experiments.base import overrides
from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.figures import in_figures, in_hours, in_seconds
from experiments.planning.plan_report import CostModel, PlanReport, schedule_name
from experiments.planning.single_plan import compared, numbers_of_micro_batches, try_plan, with_step_interval
from experiments.report.table import Value, aligned
from suite.errors import PlanError
from suite.log import Log
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.partition import cell_ranges, partition
from suite.pipeline.planning.simulate import Links
from suite.settings import AUTO, PipelineSettings

SHOWN = 6
"""How many shapes are planned again with every schedule."""

SEARCHED = 2
"""For how many of these a schedule is searched."""

PIPELINE_NAMES = ("stages", "replicas", "micro_batches", "schedule", "virtual_stages", "remat")
"""The settings that a search chooses."""

_BY_THE_FILE = ("stages", "micro_batches", "schedule", "virtual_stages")
"""What a schedule from a file determines."""


def split_pipeline_auto(settings: str) -> tuple[str, bool]:
    """Returns the settings without ``pipeline=auto``, which leaves all of this to the plan of a new run, and whether it
    is among them."""
    parts = overrides.split(settings)
    rest = [part for part in parts if part != "pipeline=auto"]
    return shlex.join(rest), len(rest) < len(parts)


def best_plans(
    work: Experiment,
    cluster: Cluster,
    cost_model: CostModel,
    given: str,
    log: Log = lambda text: None,
    workers: int | None = None,
) -> list[PlanReport]:
    """Returns plans of a run, the fastest first, each with another K and R. The settings that are ``given`` stay; with
    ``workers``, K x R is that number.

    Raises PlanError, with the faults of the shape that has the most stages, when none fits.
    """
    fixed = _with_implied(work, given_names(work, given))
    plans = first_plans(work, cluster, cost_model, fixed, log, workers)[:SHOWN]
    if _chooses_schedule(fixed):
        exact = [_with(report.experiment, (), schedule="auto") for report in plans]
        plans = _sorted([try_plan(work, cluster, cost_model) for work in exact])
    searched = [compared(report, log) for report in plans[:SEARCHED]]
    return _sorted([*searched, *map(with_step_interval, plans[SEARCHED:])])


def first_plans(
    work: Experiment,
    cluster: Cluster,
    cost_model: CostModel,
    fixed: Collection[str],
    log: Log = lambda text: None,
    workers: int | None = None,
) -> list[PlanReport]:
    """Returns plans for each K and R with 1F1B, or with the schedule of the run if it is ``fixed``, the fastest first.
    Raises PlanError as ``best_plans`` does."""
    free, fixed = freed(work, fixed)
    largest, others = _shapes(free, cluster, fixed, workers)
    plans = _fitting(free, (largest, others), cluster, cost_model, log)
    planned = {(report.experiment.pipeline.stages, report.experiment.pipeline.replicas) for report in plans}
    has_cores = cluster.kind == "cpu" and cluster.device is None
    if has_cores and (1, 1) in others and (1, 1) not in planned:  # the threads of one worker have all cores
        with suppress(PlanError):
            plans = _sorted([*plans, *_fitting(free, ([(1, 1)],), cluster, cost_model, log)])
    return plans


def given_names(work: Experiment, given: str | Iterable[str]) -> set[str]:
    """Returns the names of the pipeline settings that a user gives."""
    return {path.removeprefix("pipeline.") for path in overrides.parse(given, type(work)) if "pipeline." in path}


def freed(work: Experiment, fixed: Collection[str]) -> tuple[Experiment, set[str]]:
    """Returns the run with the settings left to its plan that are not ``fixed``, and those that are, with others that
    they determine. Where the schedule is free, it is 1F1B."""
    fixed = _with_implied(work, fixed)
    free = _with(work, fixed, micro_batches=AUTO, remat="auto", virtual_stages=1)
    return _with(free, fixed, schedule="1f1b" if _chooses_schedule(fixed) else "auto"), fixed


def _with_implied(work: Experiment, names: Collection[str]) -> set[str]:
    """Returns the settings that stay, with those that others determine."""
    fixed = {*names, *(_BY_THE_FILE if work.pipeline.schedule_rows else ())}
    fixed.update(("stages",) if work.pipeline.layers_per_cell is not None else ())
    fixed.update(("virtual_stages",) if "schedule" in fixed else ())
    return fixed


def _chooses_schedule(fixed: Collection[str]) -> bool:
    """Whether 1F1B can stand for all schedules."""
    return not {"schedule", "virtual_stages", "remat"} & set(fixed)


def _with(work: Experiment, fixed: Collection[str], **changes: Any) -> Experiment:
    """Returns the run with these settings of its pipeline, but for those that are fixed."""
    update = {name: value for name, value in changes.items() if name not in fixed}
    return work.with_pipeline(work.pipeline.model_copy(update=update))


_Shapes = Sequence[tuple[int, int]]
"""Pairs of K and R."""


def most_replicas(work: Experiment, cluster: Cluster, fixed: Collection[str]) -> dict[int, int]:
    """Returns the most replicas for each number of stages that a run with some ``fixed`` settings may have."""
    pipeline, devices = work.pipeline, cluster.devices
    most_rows = work.min_rows // max(1, pipeline.micro_batches)
    least = pipeline.replicas if "replicas" in fixed else 1
    stages = range(1, min(work.list_length // pipeline.virtual_stages, devices // least) + 1)
    if "stages" in fixed:
        stages = range(pipeline.stages, pipeline.stages + 1)
    return {k: least if "replicas" in fixed else max(1, min(most_rows, devices // k)) for k in stages}


def _shapes(work: Experiment, cluster: Cluster, fixed: Collection[str], workers: int | None) -> tuple[_Shapes, _Shapes]:
    """Returns the shapes to which neither a stage nor a replica can be added, and those with the least replicas; or
    those of so many workers, if there are any."""
    most = most_replicas(work, cluster, fixed)
    least = work.pipeline.replicas if "replicas" in fixed else 1
    exact = [(k, workers // k) for k in most if workers is not None and workers % k == 0]
    if exact := [(k, r) for k, r in exact if "replicas" not in fixed or r == least]:
        return exact, []
    largest, others = largest_shapes(most, least)
    return largest or [(1, least)], others  # without any, its plan says what is missing


def largest_shapes(most: Mapping[int, int], least: int = 1) -> tuple[_Shapes, _Shapes]:
    """Returns the shapes with the most replicas to which no stage can be added, and those with the least replicas."""
    largest = [(k, r) for k, r in most.items() if most.get(k + 1) != r]
    return largest, [(k, least) for k in most if (k, least) not in largest]


def _fitting(
    work: Experiment, groups: Iterable[_Shapes], cluster: Cluster, cost_model: CostModel, log: Log
) -> list[PlanReport]:
    """Returns the plans of the first group that has any that fit, the fastest first; those that cannot be among the
    first SHOWN are left out. Raises the last fault if none."""
    for shapes in groups:
        plans: list[PlanReport] = []
        for stages, replicas in shapes:
            log(f"K = {stages}, R = {replicas}")
            shape = _with(work, (), stages=stages, replicas=replicas)
            shown = _sorted(plans)[:SHOWN]
            if len(shown) == SHOWN and _least_step_s(shape, cluster, cost_model) >= shown[-1].step_s:
                continue
            try:
                plans.append(try_plan(shape, cluster, cost_model))
            except PlanError as error:
                fault = error
        if plans:
            return _sorted(plans)
    raise fault


def _least_step_s(work: Experiment, cluster: Cluster, cost_model: CostModel) -> float:
    """Returns a bound of a step of one cell a stage on declared devices: the slowest stage of the most even cut, with
    the fewest micro-batches. More of them take no less in all. Elsewhere returns 0."""
    pipeline = work.pipeline
    if cluster.device is None or pipeline.schedule != "1f1b" or pipeline.virtual_stages > 1:
        return 0.0
    fewest = next(numbers_of_micro_batches(work))
    seconds = [cost.recompute_s + cost.backward_s for cost in cost_model(fewest, cluster).costs]
    cells = cell_ranges(partition(seconds, pipeline.stages), len(seconds))
    return fewest.pipeline.micro_batches * max(sum(seconds[layer] for layer in cell) for cell in cells)


def _sorted(plans: Sequence[PlanReport]) -> list[PlanReport]:
    return sorted(plans, key=lambda report: report.step_s)


def lines_of(plans: Sequence[PlanReport]) -> Iterator[str]:
    """Yields a table of what ``best_plans`` found, as lines to print; nothing without plans."""
    if not plans:
        return
    yield f"the fastest plans of {plans[0].experiment.name}:"
    shown = "step", f"{plans[0].experiment.unit}/s", "whole run", "largest stage", "bubble", "links between nodes"
    rows: list[list[Value]] = []
    for report in plans:
        plan, pipeline, link = report.plan, report.plan.pipeline, report.layer_costs.machine.link
        peak = max(cell.peak_bytes for cell in plan.cells) / GIB
        rows.append([
            pipeline.stages, pipeline.replicas, pipeline.micro_batches, schedule_name(plan.schedule_config),
            in_seconds(report.step_s), in_figures(report.units_per_second), in_hours(3600 * report.hours),
            f"{peak:.2f} GiB", f"{plan.timeline.bubble:.1%}", len(link.cuts) if isinstance(link, Links) else 0,
        ])  # fmt: skip
    yield from (f"  {line}" for line in aligned(("K", "R", "M", "schedule", *shown), rows).splitlines())


def settings_of(report: PlanReport, work: Experiment) -> str:
    """Returns the pipeline settings with which another experiment has this plan."""
    wanted = report.plan.pipeline
    if wanted.schedule == "search":  # it is searched again, and found again
        wanted = report.experiment.pipeline
    return changed_settings(wanted, work.pipeline)


def changed_settings(wanted: PipelineSettings, before: PipelineSettings) -> str:
    """Returns the settings, of those that a search chooses, that make a pipeline of another one."""
    changed = [name for name in PIPELINE_NAMES if getattr(wanted, name) != getattr(before, name)]
    return " ".join(f"pipeline.{name}={getattr(wanted, name)}" for name in changed)
