"""The other schedules of a plan: those that its settings allow, and what search finds.

placements of the cells -> for each, cuts of the layers -> search in each stage's memory -> the fastest of all
                                                           half of the time for all cuts, half for the best of them
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from suite.pipeline.planning.fit import MemoryFit, Problem
from suite.pipeline.planning.partial_schedule import SchedulingProblem
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.plan import (
    Alternative,
    Plan,
    assemble,
    cell_costs,
    scheduling_problem,
    step_lower_bound_s,
    try_schedule,
)
from suite.pipeline.planning.search import search
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.auto import SEARCHED_REMAT, candidates, least_candidates
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import rows_of
from suite.settings import PipelineSettings

SEARCH_S = 10.0
"""The time of all searches of a plan, in the seconds of ``search``; twice that where a search begins again."""

LEAST_GAIN = 0.001
"""The share of a step that a search must be able to save: a cut whose lower bound promises less is not searched."""


def compare_schedules(plan: Plan, problem: Problem) -> Plan:
    """Returns the plan of a problem with its alternatives."""
    if plan.alternatives:
        return plan
    chosen = Alternative.of(plan.pipeline, plan)
    allowed = candidates(problem.pipeline, len(problem.costs))
    others = [candidate for candidate in allowed if not chosen.is_of(candidate)]
    outcomes = [try_schedule(replace(problem, pipeline=candidate)) for candidate in others]
    alternatives = [chosen, *map(Alternative.of, others, outcomes)]
    return replace(plan, alternatives=tuple(alternatives))


def search_schedule(plan: Plan, problem: Problem) -> Plan:
    """Returns the plan of a problem with ``schedule=auto``, or a faster one whose schedule was found by search; any
    other plan as it is."""
    pipeline = problem.pipeline
    if pipeline.schedule != "auto" or pipeline.remat not in SEARCHED_REMAT or pipeline.stages == 1:
        return plan
    enough_s = (1 - LEAST_GAIN) * plan.step_s
    cuts = [cut for cut in _cuts(problem) if cut.bound_s <= enough_s]
    found = [(cut, _searched(cut, SEARCH_S / 2 / len(cuts))) for cut in cuts]
    searched = [(cut, one) for cut, one in found if one is not None]
    if not searched:
        return plan
    cut, best = min(searched, key=lambda each: each[1].step_s)
    best = min(best, _searched(cut, SEARCH_S / 2, seed=1) or best, key=lambda one: one.step_s)
    if best.step_s >= plan.step_s:
        return plan
    named = [each for each in plan.alternatives if each.schedule != "search"]
    return replace(best, alternatives=(*named, Alternative.of(best.pipeline, best)))


@dataclass(frozen=True)
class _Candidate:
    """A cut of the layers into cells, with what a search for it is given."""

    fit: MemoryFit
    ranges: list[range]
    starts: list[Schedule]
    """The schedules that fit without a search."""
    problem: SchedulingProblem
    bound_s: float
    """Of the step."""


def _cuts(problem: Problem) -> Iterator[_Candidate]:
    """Yields the cuts to search: for each placement those of the fastest named schedule, of the least memory, and of
    even stages."""
    pipeline, costs = problem.pipeline, problem.costs
    for settings in _by_placement(pipeline, len(costs)):
        fitting: list[Plan] = []
        for candidate in settings:
            if candidate.schedule == "search" and fitting:
                break  # one micro-batch at a time: only where nothing else fits
            outcome = try_schedule(replace(problem, pipeline=candidate))
            fitting += [outcome] if isinstance(outcome, Plan) else []
        fitting.sort(key=lambda one: one.step_s)
        by_hand = pipeline.layers_per_cell
        layers_per_cell = [one.layers_per_cell for one in fitting[:1]] if by_hand is None else [by_hand]
        if by_hand is None:
            fit = MemoryFit(replace(problem, pipeline=settings[0]).with_pipeline(remat="never"))
            layers_per_cell += [fit.lightest_partition(), fit.partition_with_even_stages()]
        fit = MemoryFit(replace(problem, pipeline=settings[0]))
        for lengths in dict.fromkeys(layers_per_cell):
            ranges = cell_ranges(lengths, len(costs))
            of_cells = cell_costs(costs, ranges, fit.placement, problem.machine, pipeline.replicas)
            searched = scheduling_problem(fit, of_cells, fit.stage_memories(ranges))
            starts = [one.schedule for one in fitting if one.layers_per_cell == lengths]
            yield _Candidate(fit, ranges, starts, searched, step_lower_bound_s(fit, ranges, of_cells))


def _by_placement(pipeline: PipelineSettings, layers: int) -> Collection[list[PipelineSettings]]:
    """Returns the settings with each schedule, by where it places the cells."""
    found: dict[tuple[int, tuple[int, ...]], list[PipelineSettings]] = {}
    for candidate in (*candidates(pipeline, layers), *least_candidates(pipeline, layers)):
        config = ScheduleConfig(candidate.schedule, virtual_stages=candidate.virtual_stages)
        found.setdefault((config.virtual_stages, config.cell_to_stage(pipeline.stages)), []).append(candidate)
    return found.values()


def _searched(cut: _Candidate, seconds: float, seed: int = 0) -> Plan | None:
    """Returns the plan that search finds for a cut of the layers, if any."""
    schedule = search(cut.problem, cut.starts, seconds, seed)
    if schedule is None:
        return None
    rows = rows_of(schedule, cut.problem.placement)
    searched = cut.fit.pipeline.model_copy(update={"schedule": "search", "schedule_rows": rows})
    # with the tensors that wait between two cells of a stage in this schedule
    fit = MemoryFit(replace(cut.fit.problem, pipeline=searched).with_pipeline(remat="never"))
    found = replace(assemble(fit, cut.ranges, fit.schedule_config), pipeline=searched)
    assert all(cell.peak_bytes <= fit.machine.memory_limit_bytes for cell in found.cells), "bytes are counted"
    return found
