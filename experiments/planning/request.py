"""A run as it is asked for: its plan, or a refusal with the nearest plan that fits, or the memory that would.

mini-batch: all of it, a half, a quarter, ... -> K x R, few doublings away first -> M and schedule as asked, then others
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product, takewhile
from typing import Any

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.figures import in_seconds
from experiments.base.hints import option
from experiments.base.setting_faults import faults_of
from experiments.base.workload import Measurable
from experiments.planning.choose import (
    MOST_DOUBLINGS,
    Shape,
    best_plans,
    compared,
    fastest_number,
    numbers_of_micro_batches,
    shapes,
    try_plan,
    with_most_micro_batches,
    with_replicas,
)
from experiments.planning.pipeline_settings import changed_settings, merged
from experiments.planning.problem import (
    CostModel,
    LayerCosts,
    device_errors,
    estimated_costs,
    model_facts,
    pose,
    reserved_bytes,
    row_errors,
    shares_cores,
)
from experiments.planning.report import PlanReport
from suite.errors import PlanError, SettingError, SuiteError
from suite.log import Log
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.plan import check_memory, least_limit
from suite.settings import AUTO

TENTH = GIB // 10
"""Resolution in bytes of the search for the least memory of a plan."""

OTHER_SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {"remat": "auto"},
    {"remat": "auto", "schedule": "1f1b", "virtual_stages": 1},
    {"remat": "auto", "schedule": "auto", "virtual_stages": 1},
)
"""Changes of a schedule, the nearest first. The last one needs the least memory, and takes the longest to plan."""

LARGE_M = 4096
"""The largest M that is tried where few devices need more micro-batches than 64K."""


def noted_plans(
    work: Experiment,
    cluster: Cluster,
    cost_model: CostModel,
    given: str,
    notes: Sequence[str],
    best: bool,
    log: Log,
    workers: int | None = None,
) -> list[PlanReport]:
    """Returns the plan of a run, or the ``best`` plans, fastest first. The first has the notes, or the PlanError."""
    try:
        if best:
            first, *others = best_plans(work, cluster, cost_model, given, log, workers)
        else:
            first, *others = [plan_request(work, cluster, cost_model, given, log)]
    except PlanError as fault:
        remedy = _remedy(work, cluster, 0, given, log) if best else fault.remedy
        raise PlanError(fault.errors, remedy, (*notes, *fault.notes)) from None
    return [replace(first, notes=(*notes, *first.notes)), *others]


def plan_request(
    work: Experiment, cluster: Cluster, cost_model: CostModel, given: str = "", log: Log = lambda text: None
) -> PlanReport:
    """Returns the plan of a run on a cluster. ``given`` are the user's settings of the run.

    Raises PlanError with all faults, and with all settings of the nearest plan that fits.
    """
    smallest = with_most_micro_batches(work)
    check_request(work, cluster, given, log)
    # other numbers of devices would not help
    if faults := smallest.trial_errors() or faults_of(model_facts, smallest):
        raise PlanError(faults)
    try:
        log(f"the plan of {work.name}")
        planned = try_plan(work, cluster, cost_model)
    except PlanError as fault:
        process_bytes = 0
        with suppress(SuiteError):
            process_bytes = cost_model(smallest, cluster).machine.process_bytes
        remedy = _remedy(work, cluster, process_bytes, given, log)
        raise PlanError(fault.errors, remedy, () if remedy else [*_memory_note(work, cluster, given)]) from None
    return compared(planned, log)


def check_request(work: Experiment, cluster: Cluster, given: str, log: Log) -> None:
    """Raises PlanError, with the nearest plan that fits, for too few devices or rows."""
    if faults := [*device_errors(work, cluster), *row_errors(with_most_micro_batches(work))]:
        log(faults[0])
        remedy = _remedy(work, cluster, 0, given, lambda part: log(f"{faults[0]}; {part}"))
        raise PlanError(faults, remedy, () if remedy else [*_memory_note(work, cluster, given)])


def _remedy(work: Experiment, cluster: Cluster, process_bytes: int, given: str, log: Log) -> str:
    """Returns the settings of the nearest plan that fits, with those that are given, and what it needs; empty if none
    fits. Costs are estimated; a worker process itself takes at least ``process_bytes``."""

    def layer_costs(changed: Measurable, cluster: Cluster) -> LayerCosts:
        costs = estimated_costs(changed, cluster)
        own_bytes = max(process_bytes, costs.machine.process_bytes)
        return replace(costs, machine=replace(costs.machine, process_bytes=own_bytes))

    nearest = nearest_plan(work, cluster, layer_costs, log)
    if nearest is None:
        return ""
    planned, settings = nearest
    peak = max(stage.peak_bytes for stage in planned.plan.cells)
    # without a declared device only the bytes are estimated
    seconds = "" if cluster.device is None else f", {in_seconds(planned.step_s)} per step"
    chosen = f'"{merged(given, settings)}"'
    return f"{option('SET', chosen)}: {peak / GIB:.2f} GiB per device{seconds} (estimated)"


def nearest_plan(work: Experiment, cluster: Cluster, cost_model: CostModel, log: Log) -> tuple[PlanReport, str] | None:
    """Returns the plan that fits least far from the run, which does not, and the settings that make it; None if no
    choice fits. With the most of its mini-batch, then the fewest doublings and halvings of K and R, then its M, then
    the nearest schedule; of free M the fastest."""

    def some_fits(mini_batch: tuple[Experiment, str]) -> bool:
        asked, near = mini_batch[0], _near_shapes(mini_batch[0], cluster)
        roomiest = near if shares_cores(cluster) else [max(near)]  # the most stages need the least memory
        return any(_fits(_roomiest(asked, shape), cluster, cost_model) for shape in roomiest)

    batches = list(_mini_batches(work.with_section("pipeline", layers_per_cell=None)))
    most = 0 if some_fits(batches[0]) else bisect_left(batches, True, lo=1, key=some_fits)
    for asked, batch in batches[most:]:
        for shape in sorted(_near_shapes(asked, cluster), key=partial(_distance, work)):
            log(f"the nearest plan that fits: K = {shape[0]}, R = {shape[1]}{batch and ', '}{batch}")
            if not _fits(_roomiest(asked, shape), cluster, cost_model):
                continue
            for choice in _variants(asked, shape):
                numbers = _numbers(choice)
                if not (numbers and _fits(numbers[0], cluster, cost_model)):
                    continue
                with suppress(PlanError):
                    planned = fastest_number(numbers, cluster, cost_model)
                    if settings := " ".join(filter(None, [_changes(work, planned), batch])):
                        return planned, settings
    return None


def _changes(work: Experiment, planned: PlanReport) -> str:
    """Returns the settings that make the pipeline of a plan of that of a run."""
    changed = changed_settings(planned.experiment.pipeline, work.pipeline)
    return changed if work.pipeline.layers_per_cell is None else f"{changed} pipeline.layers_per_cell=none".strip()


def _mini_batches(work: Experiment) -> Iterator[tuple[Experiment, str]]:
    """Yields the run, then with a half of its mini-batch, a quarter, ..., and the setting for it."""
    yield work, ""
    before = work
    with suppress(SettingError):  # a batch so small that it contradicts other settings
        for power in range(1, work.batch.bit_length()):
            smaller, setting = work.with_batch_fraction(2.0**-power)
            if smaller.batch == before.batch:
                return
            yield smaller, setting
            before = smaller


def _near_shapes(work: Experiment, cluster: Cluster) -> list[Shape]:
    """Returns the shapes with K and R as they are, doubled and halved, 1 and the most."""
    asked = work.pipeline
    fixed = {"stages"} if asked.schedule_rows else set()
    free = work if asked.schedule_rows else work.with_section("pipeline", micro_batches=AUTO, virtual_stages=1)
    found = shapes(free, cluster, fixed)
    most = dict(found)  # the last R of each K
    near = [(k, r) for k, r in found if _is_near(k, asked.stages, max(most)) and _is_near(r, asked.replicas, most[k])]
    own = asked.stages, asked.replicas
    return [*near, own] if shares_cores(cluster) and own not in near else near


def _is_near(count: int, asked: int, most: int) -> bool:
    return count in (1, most) or math.log2(count / asked).is_integer()


def _distance(work: Experiment, shape: Shape) -> tuple[float, float]:
    """Returns by how many doublings and halvings a shape differs from that of the run, and its stages do."""
    asked = work.pipeline.stages, work.pipeline.replicas
    stages, replicas = (abs(math.log2(own / other)) for own, other in zip(shape, asked, strict=True))
    return round(stages + replicas, 6), stages


def _roomiest(work: Experiment, shape: Shape) -> Experiment:
    """Returns the choice of a shape that needs the least memory."""
    *_, last = _variants(work, shape)
    numbers = _numbers(last)
    return numbers[0] if numbers else last


def _variants(work: Experiment, shape: Shape) -> Iterator[Experiment]:
    """Yields the choices of a shape, the nearest first: M as it is, then free; all schedules at last. A schedule from a
    file keeps its M."""
    stages, replicas = shape
    asked = with_replicas(work, replicas).with_section("pipeline", stages=stages)
    by_file = asked.pipeline.schedule_rows is not None
    *few, every = OTHER_SCHEDULES[:2] if by_file else OTHER_SCHEDULES
    numbers = dict.fromkeys([asked.pipeline.micro_batches, *([] if by_file else [AUTO])])
    for schedules in (few, [every]):
        for count, changes in product(numbers, schedules):
            yield asked.with_section("pipeline", micro_batches=count, **changes)


def _numbers(choice: Experiment) -> list[Experiment]:
    """Returns the choice with each number of micro-batches, the most first: fewer are larger, take long to estimate,
    and need more memory."""
    pipeline = choice.pipeline
    most = max(pipeline.stages << MOST_DOUBLINGS, LARGE_M)
    is_free, every = pipeline.micro_batches == AUTO, numbers_of_micro_batches(choice)
    numbers = takewhile(lambda number: number.pipeline.micro_batches <= most, every) if is_free else every
    return [number for number in numbers if not number.setting_errors()][::-1]


def _fits(choice: Experiment, cluster: Cluster, cost_model: CostModel) -> bool:
    """Whether a choice fits the memory; no step is simulated."""
    try:
        check_memory(pose(choice, cluster, cost_model).problem)
    except PlanError:
        return False
    return True


def _memory_note(work: Experiment, cluster: Cluster, given: str) -> Iterator[str]:
    """Yields the memory that would suffice if no setting fits; nothing if memory is not the problem."""
    asked = work.with_section("pipeline", layers_per_cell=None)
    own = asked.pipeline.stages, asked.pipeline.replicas
    roomiest = _roomiest(asked, own if shares_cores(cluster) else max(_near_shapes(asked, cluster)))
    with suppress(SuiteError):
        least = least_memory(roomiest, cluster)
        if least is not None and least > cluster.bytes_per_device:
            if shares_cores(cluster):
                needs = f"at least {least * cluster.devices / GIB:.1f} GiB in total"
            else:
                needs = f"devices of at least {least / GIB:.1f} GiB"
            chosen = f'"{merged(given, changed_settings(roomiest.pipeline, work.pipeline))}"'
            yield f"no setting was found that fits; with {option('SET', chosen)} the run needs {needs}"


def least_memory(work: Experiment, cluster: Cluster) -> int | None:
    """Returns the least memory of each device in bytes, reserve included, in tenths of a GiB; None if no memory is
    enough. Costs are estimated. Raises PlanError for other faults than memory."""
    work = with_most_micro_batches(work)
    # to a MiB: rounded to tenths before the reserve is added, it would be rounded twice
    limit = least_limit(pose(work, cluster, estimated_costs).problem, 2**20)
    if limit is None:
        return None
    tenths = -(-limit // TENTH)
    while tenths * TENTH - reserved_bytes(work, cluster, tenths * TENTH) < limit:
        tenths += 1
    workers = work.pipeline.stages * work.pipeline.replicas
    return -(-tenths * TENTH * workers // cluster.devices) if shares_cores(cluster) else tenths * TENTH
