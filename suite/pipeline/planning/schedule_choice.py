"""The other schedules of a plan: those that its settings allow, and what search finds.

fastest schedule of each placement of the cells -> search from there, in the same memory -> the fastest of all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from suite.errors import PlanError
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.plan import Alternative, Plan, assemble, candidates, try_schedule
from suite.pipeline.planning.search import search
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import recomputes, rows_of
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import PipelineSettings


def compare_schedules(
    plan: Plan, costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
) -> Plan:
    """Returns a plan with its alternatives, for the arguments of ``make_plan``."""
    if plan.alternatives:
        return plan
    chosen = Alternative.of(plan.pipeline, plan)
    others = [candidate for candidate in candidates(pipeline, len(costs)) if not chosen.is_of(candidate)]
    outcomes = [try_schedule(costs, candidate, bytes_per_param, machine) for candidate in others]
    alternatives = [chosen, *map(Alternative.of, others, outcomes)]
    return replace(plan, alternatives=tuple(alternatives))


def search_schedule(
    plan: Plan, costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
) -> Plan:
    """Returns a plan of ``schedule=auto``, or a faster one whose schedule was found by search; any other plan as it is.
    The arguments are those of ``make_plan``.
    """
    if pipeline.schedule != "auto" or pipeline.remat not in ("auto", "never") or pipeline.stages == 1:
        return plan
    fastest: dict[tuple[int, tuple[int, ...]], Plan] = {}
    for candidate in candidates(pipeline, len(costs)):
        start = try_schedule(costs, candidate, bytes_per_param, machine)
        if isinstance(start, Plan):
            key = start.pipeline.virtual_stages, start.schedule_config.owners(pipeline.stages)
            fastest[key] = min(start, fastest.get(key, start), key=lambda one: one.step_s)
    searched = [_searched(start, costs, bytes_per_param, machine) for start in fastest.values()]
    if pipeline.remat == "never":
        searched = [found for found in searched if not recomputes(found.schedule_config.rows)]
    found = min([plan, *searched], key=lambda one: one.step_s)
    if found is plan or found.pipeline.schedule != "search":
        return plan
    return replace(found, alternatives=(*plan.alternatives, Alternative.of(found.pipeline, found)))


def _searched(start: Plan, costs: Sequence[LayerCost], bytes_per_param: float, machine: Machine) -> Plan:
    """Returns the plan that search finds for the cells of another one, or that plan if it finds none that is faster."""
    ranges = [range(cell.begin, cell.end) for cell in start.cells]
    fit = MemoryFit(costs, start.pipeline, bytes_per_param, machine)
    stages, config = start.pipeline.stages, start.schedule_config
    placement = config.placement(stages)
    schedule = search(
        placement,
        start.pipeline.micro_batches,
        [cell.cost for cell in start.cells],
        machine.link,
        fit.stage_memories(ranges),
        machine.memory_limit_bytes,
        machine.transport,
        [start.schedule],
    )
    if schedule is None or schedule == start.schedule:
        return start
    rows = rows_of(schedule, placement)
    searched = start.pipeline.model_copy(update={"schedule": "search", "schedule_rows": rows})
    found = ScheduleConfig("search", (UNLIMITED,), config.virtual_stages, rows, config.transport)
    try:
        return assemble(costs, searched, fit, ranges, found, machine)
    except PlanError:  # such as a circle of waits on NCCL, of which the search knows nothing
        return start
