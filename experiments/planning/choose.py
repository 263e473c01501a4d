"""Which K, R, M and schedule: a list of plans that fit, the fastest first, and the questions that are asked of it.

choices: K x R, M, schedule, recomputes -> one try of each -> plans

as asked        the only choice, or the fastest M
the fastest     K x R on the devices, at first with 1F1B; the first few with all schedules
fewer devices   K x R on those that are left

6 devices       K   1 2 3 6      shapes to which neither a stage nor a replica can be added; if none of them fits,
                R   6 3 2 1      those with the fewest replicas; on CPUs also one worker, whose threads have all cores
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.figures import in_seconds
from experiments.planning.pipeline_settings import given_names
from experiments.planning.problem import CostModel, estimated_costs, model_facts, pose, shares_cores
from experiments.planning.report import PlanReport
from suite.errors import PlanError
from suite.log import Log
from suite.pipeline.planning.partition import cell_ranges, partition
from suite.pipeline.planning.plan import make_plan, retimed_step_s
from suite.pipeline.planning.schedule_choice import compare_schedules, search_schedule
from suite.settings import AUTO

SHOWN = 6
"""How many shapes are planned again with every schedule."""

SEARCHED = 2
"""For how many of these a schedule is searched."""

MOST_DOUBLINGS = 6
"""Of K micro-batches where a plan chooses their number and nothing fits: plans nearby take minutes with more, and tiny
micro-batches need more memory for what is kept of each."""

LONGER = 1.02
"""How much longer than the fastest a step takes where the search for M ends. Steps get a little longer before they get
shorter where more micro-batches are small enough to be kept, and not recomputed."""

BY_FILE = ("stages", "micro_batches", "schedule", "virtual_stages")
"""What a schedule from a file determines."""

Shape = tuple[int, int]
"""K and R."""


def plans(
    choices: Iterable[Experiment], cluster: Cluster, cost_model: CostModel, log: Log = lambda text: None
) -> list[PlanReport]:
    """Returns the plans of the choices that fit, the fastest first; choices that cannot be among the first ``SHOWN``
    are left out. Raises PlanError with the faults of the last choice when none fits."""
    found: list[PlanReport] = []
    for choice in choices:
        log(f"K = {choice.pipeline.stages}, R = {choice.pipeline.replicas}")
        if len(found) >= SHOWN and least_step_s(choice, cluster, cost_model) >= found[SHOWN - 1].step_s:
            continue
        try:
            found = sorted([*found, try_plan(choice, cluster, cost_model)], key=attrgetter("step_s"))
        except PlanError as error:
            fault = error
    if not found:
        raise fault
    return found


def least_step_s(work: Experiment, cluster: Cluster, cost_model: CostModel) -> float:
    """Returns a bound of a step of one cell a stage on declared devices: the slowest stage of the most even cut, with
    the fewest micro-batches. More of them take no less in all. Elsewhere returns 0."""
    pipeline = work.pipeline
    if cluster.device is None or pipeline.schedule != "1f1b" or pipeline.virtual_stages > 1:
        return 0.0
    fewest = next(numbers_of_micro_batches(work))
    seconds = [cost.recompute_s + cost.backward_s for cost in cost_model(fewest, cluster).costs]
    cells = cell_ranges(partition(seconds, pipeline.stages), len(seconds))
    return fewest.pipeline.micro_batches * max(sum(seconds[layer] for layer in cell) for cell in cells)


def try_plan(work: Experiment, cluster: Cluster, cost_model: CostModel = estimated_costs) -> PlanReport:
    """Returns the plan of one K, R and schedule, without alternatives; where the plan may choose M, the fastest of K,
    2K, 4K, ... Raises PlanError with all faults; when none fits, those of 64K micro-batches or of as many as there are
    examples for."""
    if work.pipeline.micro_batches != AUTO:
        return _plan_of(work, cluster, cost_model)
    return fastest_number(numbers_of_micro_batches(work), cluster, cost_model)


def fastest_number(choices: Iterable[Experiment], cluster: Cluster, cost_model: CostModel) -> PlanReport:
    """Returns the fastest plan of choices of M in a row, until a step takes over ``LONGER`` times the fastest, or two
    in a row are no faster: more of them leave a smaller bubble, but each has fixed costs."""
    found: list[PlanReport] = []
    faults: list[PlanError] = []
    for choice in choices:
        try:
            found.append(_plan_of(choice, cluster, cost_model))
        except PlanError as error:
            if found:
                break
            faults.append(error)
            continue
        best = min(range(len(found)), key=lambda at: found[at].step_s)
        if found[-1].step_s > LONGER * found[best].step_s or len(found) - 1 - best == 2:
            break
    if not found:
        raise faults[: MOST_DOUBLINGS + 1][-1]
    chosen, (first, *_) = min(found, key=lambda report: report.step_s), found
    steps = ", ".join(f"{in_seconds(plan.step_s)} with M = {plan.experiment.pipeline.micro_batches}" for plan in found)
    more = f"; fewer than {first.experiment.pipeline.micro_batches} do not fit" if faults else ""
    note = f"the plan chose M = {chosen.experiment.pipeline.micro_batches}: a step takes {steps}{more}"
    return replace(chosen, notes=(*chosen.notes, note))


def _plan_of(work: Experiment, cluster: Cluster, cost_model: CostModel) -> PlanReport:
    """Returns the plan of one choice."""
    posed = pose(work, cluster, cost_model)
    plan = make_plan(posed.problem)
    parameters = model_facts(work).parameters
    return PlanReport(work, cluster, posed.layer_costs, posed.problem, plan, parameters, posed.notes, posed.placement)


def numbers_of_micro_batches(work: Experiment) -> Iterator[Experiment]:
    """Yields the workload as it is, if it has a number of micro-batches; otherwise with K, 2K, 4K, ... of them, as long
    as each has an example, and at last with the largest multiple of K; if there are fewer than K examples, with one for
    each."""
    if work.pipeline.micro_batches != AUTO:
        yield work
        return
    pipeline, most = work.pipeline, max(1, work.min_rows // work.pipeline.replicas)
    most = most // pipeline.stages * pipeline.stages or most
    counts = [pipeline.stages << power for power in range((most // pipeline.stages).bit_length())]
    for count in dict.fromkeys([*counts, most]):
        yield work.with_section("pipeline", micro_batches=count)


def with_most_micro_batches(work: Experiment) -> Experiment:
    """Returns the workload with a number of micro-batches: if the plan may choose it, with 64K or as many as there are
    examples for."""
    return list(islice(numbers_of_micro_batches(work), MOST_DOUBLINGS + 1))[-1]


def compared(planned: PlanReport, log: Log) -> PlanReport:
    """Returns a plan with its alternatives; where the plan may choose its schedule, with the one that search finds."""
    log("the other schedules")
    plan = search_schedule(compare_schedules(planned.plan, planned.problem), planned.problem)
    return with_step_interval(replace(planned, plan=plan))


def with_step_interval(planned: PlanReport) -> PlanReport:
    """Returns the plan with its step at the highest and lowest efficiency of the device, if that is declared."""
    extremes = planned.layer_costs.at_extremes
    if not extremes:
        return planned
    low, high = (retimed_step_s(planned.plan, costs) for costs in extremes)
    return replace(planned, step_interval_s=(low, high))


def shapes(work: Experiment, cluster: Cluster, fixed: Collection[str]) -> list[Shape]:
    """Returns each K and R, in this order, that layers, rows and devices allow; of those that are ``fixed`` no other.
    The first shape, where none is allowed: its plan says what is missing."""
    pipeline, devices = work.pipeline, cluster.devices
    most_rows = max(1, work.min_rows // max(1, pipeline.micro_batches))
    most_stages = max(1, work.list_length // pipeline.virtual_stages)
    stages, replicas = range(1, most_stages + 1), range(1, most_rows + 1)
    if "stages" in fixed:
        stages = range(pipeline.stages, pipeline.stages + 1)
    if "replicas" in fixed:
        replicas = range(pipeline.replicas, pipeline.replicas + 1)
    found = [(k, r) for k in stages[:devices] for r in replicas[: devices // k] if k * r <= devices]
    return found or [(stages[0], replicas[0])]


def largest_first(found: Sequence[Shape], has_cores: bool = False) -> Iterator[list[Shape]]:
    """Yields the shapes to which neither a stage nor a replica can be added, with one worker that ``has_cores``; then
    the others with the fewest replicas. Each K of ``found`` is one more than the one before it."""
    most = dict(found)  # the last R of each K
    largest = [(k, r) for k, r in most.items() if most.get(k + 1) != r]
    if has_cores and (1, 1) in found and (1, 1) not in largest:
        largest.append((1, 1))
    yield largest
    least = min(r for _, r in found)
    if others := [(k, least) for k in most if (k, least) not in largest]:
        yield others


def plans_of_shapes(
    work: Experiment,
    cluster: Cluster,
    cost_model: CostModel,
    given: str | Iterable[str],
    log: Log = lambda text: None,
    workers: int | None = None,
) -> list[PlanReport]:
    """Returns plans, each with another K and R; with 1F1B unless a schedule or its recomputes are ``given``. With
    ``workers``, K x R is that number. Raises PlanError, with the faults of the shape that has the most stages, when
    none fits."""
    fixed = _fixed(work, given)
    free = {"micro_batches": AUTO, "remat": "auto", "virtual_stages": 1}
    free["schedule"] = "1f1b" if _chooses_schedule(fixed) else "auto"
    work = work.with_section("pipeline", **{name: value for name, value in free.items() if name not in fixed})
    found = shapes(work, cluster, fixed)
    groups = list(largest_first(found, shares_cores(cluster)))
    if exact := [(k, r) for k, r in found if k * r == workers]:
        groups = [exact]
    for group in groups:
        choices = [work.with_section("pipeline", stages=k, replicas=r) for k, r in group]
        try:
            return plans(choices, cluster, cost_model, log)
        except PlanError as error:
            fault = error
    raise fault


def best_plans(
    work: Experiment,
    cluster: Cluster,
    cost_model: CostModel,
    given: str,
    log: Log = lambda text: None,
    workers: int | None = None,
) -> list[PlanReport]:
    """Returns plans of a run, the fastest first, each with another K and R. Mini-batch, model and the settings that are
    ``given`` stay; with ``workers``, K x R is that number. 1F1B stands for all schedules while K, R and M are chosen:
    it needs little memory, and no other is far from it.

    Raises PlanError, as ``plans_of_shapes`` does, when none fits.
    """
    found = plans_of_shapes(work, cluster, cost_model, given, log, workers)[:SHOWN]
    if _chooses_schedule(_fixed(work, given)):
        exact = [report.experiment.with_section("pipeline", schedule="auto") for report in found]
        found = plans(exact, cluster, cost_model, log)
    searched = [compared(report, log) for report in found[:SEARCHED]]
    return sorted([*searched, *map(with_step_interval, found[SEARCHED:])], key=attrgetter("step_s"))


def _fixed(work: Experiment, given: str | Iterable[str]) -> set[str]:
    """Returns the names of the given pipeline settings, with those that they determine."""
    fixed = {*given_names(work, given), *(BY_FILE if work.pipeline.schedule_rows else ())}
    fixed.update(("stages",) if work.pipeline.layers_per_cell is not None else ())
    fixed.update(("virtual_stages",) if "schedule" in fixed else ())
    return fixed


def _chooses_schedule(fixed: Collection[str]) -> bool:
    """Whether 1F1B can stand for all schedules."""
    return not {"schedule", "virtual_stages", "remat"} & set(fixed)


def smaller_runs(planned: PlanReport, devices: int, find_cluster: Callable[[], Cluster]) -> Iterator[Experiment]:
    """Yields a run as planned if it needs at most ``devices``, then at a smaller K or R, fastest by its costs first.

    Micro-batches and schedule stay, and the replicas divide the former evenly: the results are those of the whole run.
    """
    work, asked = planned.experiment, planned.experiment.pipeline
    total = asked.micro_batches * asked.replicas
    if asked.stages * asked.replicas <= devices:
        yield work
    divisors = [count for count in range(1, asked.replicas + 1) if total % count == 0]
    found = [(k, r) for k in range(1, asked.stages + 1) for r in divisors if k * r <= devices]
    for group in largest_first(found) if found else ():
        choices = []
        for k, r in group:
            cells = asked.layers_per_cell if k == asked.stages else None
            choices.append(
                work.with_section("pipeline", stages=k, replicas=r, micro_batches=total // r, layers_per_cell=cells)
            )
        with suppress(PlanError):  # the schedule may not support these stages
            fitting = plans(choices, find_cluster(), lambda *_: planned.layer_costs)
            yield from (plan.experiment for plan in fitting)


def limit_replicas_to_cluster(work: Experiment, cluster: Cluster) -> tuple[Experiment, tuple[str, ...]]:
    """Returns the workload with at most as many replicas as the cluster has devices for, and a note on the change.

    Mini-batch and total number of micro-batches stay the same, so each replica gets more micro-batches; with a schedule
    from a file it gets as many, but larger ones.
    """
    pipeline = work.pipeline
    replicas = cluster.devices // pipeline.stages
    if not 0 < replicas < pipeline.replicas:
        return work, ()
    changed = with_replicas(work, replicas)
    count = changed.pipeline.micro_batches
    more = "" if count in (AUTO, pipeline.micro_batches) else f" and M {pipeline.micro_batches} -> {count}"
    note = (
        f"R {pipeline.replicas} -> {replicas}{more}: {cluster.devices} devices hold {replicas} x {pipeline.stages} "
        "stages; the mini-batch stays the same"
    )
    return changed, (note,)


def with_replicas(work: Experiment, replicas: int) -> Experiment:
    """Returns the workload with other replicas and, unless a file schedules them, as many micro-batches in all."""
    pipeline = work.pipeline
    total = pipeline.micro_batches * pipeline.replicas
    count = pipeline.micro_batches if pipeline.schedule_rows else -(-total // replicas)
    return work.with_section("pipeline", replicas=replicas, micro_batches=count)
