"""The other schedules of a plan: those that its settings allow, and what search finds.

placements of the cells -> for each, cuts of the layers -> search in each stage's memory -> the fastest of all
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from suite.errors import PlanError
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.partial_schedule import SchedulingProblem
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.plan import (
    Alternative,
    Plan,
    assemble,
    candidates,
    cell_cost,
    step_lower_bound_s,
    try_schedule,
)
from suite.pipeline.planning.search import search
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import rows_of
from suite.settings import PipelineSettings

LEAST_GAIN = 0.001
"""The share of a step that a search must be able to save: a cut whose lower bound promises less is not searched."""


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
    best = plan
    for settings in _by_placement(pipeline, len(costs)):
        without_recomputes = settings[0].model_copy(update={"remat": "never"})
        fit = MemoryFit(costs, without_recomputes, bytes_per_param, machine)
        outcomes = [try_schedule(costs, candidate, bytes_per_param, machine) for candidate in settings]
        fitting = sorted((one for one in outcomes if isinstance(one, Plan)), key=lambda one: one.step_s)
        cuts = [one.layers_per_cell for one in fitting[:1]]
        if pipeline.layers_per_cell is None:
            cuts += [fit.lightest_cut(), fit.cut_with_even_stages()]
        for cut in dict.fromkeys(cuts):
            starts = [one.schedule for one in fitting if one.layers_per_cell == cut]
            found = _searched(settings[0], cut, starts, costs, bytes_per_param, machine, best.step_s)
            best = min(best, found or best, key=lambda one: one.step_s)
    if best is plan:
        return plan
    return replace(best, alternatives=(*plan.alternatives, Alternative.of(best.pipeline, best)))


def _by_placement(pipeline: PipelineSettings, layers: int) -> Collection[list[PipelineSettings]]:
    """Returns the settings with each schedule, by where it places the cells."""
    found: dict[tuple[int, tuple[int, ...]], list[PipelineSettings]] = {}
    for candidate in candidates(pipeline, layers):
        config = ScheduleConfig(candidate.schedule, virtual_stages=candidate.virtual_stages)
        found.setdefault((config.virtual_stages, config.owners(pipeline.stages)), []).append(candidate)
    return found.values()


def _searched(
    pipeline: PipelineSettings,
    cut: tuple[int, ...],
    starts: Sequence[Schedule],
    costs: Sequence[LayerCost],
    bytes_per_param: float,
    machine: Machine,
    below_s: float,
) -> Plan | None:
    """Returns the plan that search finds for a cut of the layers, if one may take less than ``below_s`` and it is none
    of ``starts``."""
    ranges, stages = cell_ranges(cut, len(costs)), pipeline.stages
    placement = ScheduleConfig(pipeline.schedule, virtual_stages=pipeline.virtual_stages).placement(stages)
    cell_costs = [cell_cost(costs, ranges, at, pipeline, machine) for at in range(len(ranges))]
    memory_fit = MemoryFit(costs, pipeline, bytes_per_param, machine)
    if step_lower_bound_s(placement, pipeline, cell_costs, memory_fit, ranges, machine) > (1 - LEAST_GAIN) * below_s:
        return None
    given = placement, pipeline.micro_batches, cell_costs, machine.link, memory_fit.stage_memories(ranges)
    limit_bytes, may_recompute = machine.memory_limit_bytes, pipeline.remat != "never"
    schedule = search(SchedulingProblem(*given, limit_bytes, machine.transport, may_recompute), starts)
    if schedule is None or schedule in starts:
        return None
    rows = rows_of(schedule, placement)
    searched = pipeline.model_copy(update={"schedule": "search", "schedule_rows": rows})
    # with the tensors that wait between two cells of a stage in this schedule
    fit = MemoryFit(costs, searched.model_copy(update={"remat": "never"}), bytes_per_param, machine)
    with suppress(PlanError):  # such as a circle of waits on NCCL, of which the search knows nothing
        found = assemble(costs, searched, fit, ranges, fit.schedule_config, machine)
        if all(cell.peak_bytes <= machine.memory_limit_bytes for cell in found.cells):
            return found
    return None
