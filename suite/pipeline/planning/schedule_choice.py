"""The other schedules of a plan: those that its settings allow, and what policies find.

placements of the cells -> for each, cuts of the layers -> policies in each stage's memory -> the fastest of all
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from suite.pipeline.planning.fit import MemoryFit, Problem
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.plan import Alternative, Plan, assemble, step_lower_bound_s, try_schedule
from suite.pipeline.planning.search import Search
from suite.pipeline.schedule.auto import SEARCHED_REMAT, candidates, least_candidates
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import rows_of
from suite.settings import PipelineSettings

LEAST_GAIN = 0.001
"""The share of a step that policies must be able to save: a cut whose lower bound promises less is left out."""


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
    """Returns the plan of a problem with ``schedule=auto``, or a faster one whose schedule a policy made; any other
    plan as it is."""
    pipeline = problem.pipeline
    if pipeline.schedule != "auto" or pipeline.remat not in SEARCHED_REMAT or pipeline.stages == 1:
        return plan
    searches, step_s = [], plan.step_s
    for fit, ranges in _cuts(plan.alternatives, problem):
        cells_problem = fit.cells_problem(ranges)
        least_s = lower_bound_s(cells_problem)
        if step_lower_bound_s(cells_problem, least_s, problem) < (1 - LEAST_GAIN) * step_s:
            search = Search(cells_problem, (1 + LEAST_GAIN) * least_s)
            search.try_family()
            if search.best is not None:
                searches.append((search, fit, ranges))
                step_s = min(step_s, search.step_s)
    if not searches:
        return plan
    search, fit, ranges = min(searches, key=lambda each: each[0].step_s)
    search.climb()
    searched = {"schedule": "search", "schedule_rows": rows_of(search.schedule(), fit.placement)}
    # nothing is recomputed beyond what the rows recompute
    of_rows = MemoryFit(fit.problem.with_pipeline(**searched, remat="never"))
    best = assemble(of_rows, ranges, of_rows.schedule_config)
    assert all(cell.peak_bytes <= problem.machine.memory_limit_bytes for cell in best.cells), "bytes are counted"
    if best.step_s >= plan.step_s:
        return plan
    best = replace(best, problem=fit.problem.with_pipeline(**searched))
    named = [each for each in plan.alternatives if each.pipeline.schedule != "search"]
    return replace(best, alternatives=(*named, Alternative.of(best.pipeline, best)))


def _cuts(planned: Sequence[Alternative], problem: Problem) -> Iterator[tuple[MemoryFit, list[range]]]:
    """Yields the cuts of the layers to try: for each placement of the cells those of the fastest named schedule, the
    most even one, and that of even stages. Schedules that are ``planned`` are not planned again."""
    layers, by_hand = len(problem.costs), problem.pipeline.layers_per_cell
    for settings in _by_placement(problem.pipeline, layers):
        fit = MemoryFit(replace(problem, pipeline=settings[0]))
        if by_hand is not None:
            yield fit, cell_ranges(by_hand, layers)
            continue
        fitting: list[Alternative] = []
        for candidate in settings:
            if candidate.schedule == "search" and fitting:
                break  # one micro-batch at a time: only where nothing else fits
            found = next((each for each in planned if each.is_of(candidate)), None) or Alternative.of(
                candidate, try_schedule(replace(problem, pipeline=candidate))
            )
            fitting += [] if found.fault else [found]
        keeping = MemoryFit(fit.problem.with_pipeline(remat="never"))
        cuts = [each.layers_per_cell for each in sorted(fitting, key=lambda each: each.step_s)[:1]]
        cuts += [keeping.most_even_partition(), keeping.partition_with_even_stages()]
        for lengths in dict.fromkeys(cuts):
            yield fit, cell_ranges(lengths, layers)


def _by_placement(pipeline: PipelineSettings, layers: int) -> Collection[list[PipelineSettings]]:
    """Returns the settings with each schedule, by where it places the cells."""
    found: dict[tuple[int, tuple[int, ...]], list[PipelineSettings]] = {}
    for candidate in (*candidates(pipeline, layers), *least_candidates(pipeline, layers)):
        config = ScheduleConfig(candidate.schedule, virtual_stages=candidate.virtual_stages)
        found.setdefault((config.virtual_stages, config.cell_to_stage(pipeline.stages)), []).append(candidate)
    return found.values()
