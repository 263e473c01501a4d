"""Plans a run before it starts: layer costs, partitioned into cells that fit the devices, simulated as a schedule.

    layer costs -> partition under the memory limit -> live-graph limit -> schedule, validated -> simulate -> step

Where the settings say ``auto``, all schedules are simulated and the fastest that fits is used, and each stage keeps as
many graphs as its memory holds, which minimises recomputes. The run executes the same schedule on the same cells, so a
plan can be compared with its trace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from suite.errors import PlanError, SettingError
from suite.pipeline.planning.costs import LayerCost, check_costs
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.fit import MemoryFit, Problem, as_plan_error
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.policies import CellsProblem
from suite.pipeline.planning.simulate import CellCost, simulate
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.auto import candidates, least_candidates
from suite.pipeline.schedule.config import ScheduleConfig, pipeline_errors
from suite.pipeline.schedule.csv_file import recomputes
from suite.pipeline.schedule.timeline import Timeline
from suite.settings import PipelineSettings


@dataclass(frozen=True)
class CellPlan:
    """One cell: its layers ``begin`` to ``end``, exclusive, and its cost for one micro-batch."""

    begin: int
    end: int
    parameters: int
    cost: CellCost
    peak_bytes: int
    """The peak of its stage, with all the stage's cells."""
    process_bytes: int = 0
    """The part of the peak that is no tensor: the stage's process and its communicators."""


@dataclass(frozen=True)
class Alternative:
    """A schedule that the settings allow: what a plan of it takes, or why it does not fit. The plan itself is not kept:
    large ones have a million actions."""

    pipeline: PipelineSettings
    fault: str = ""
    """Empty if it fits."""
    step_s: float = math.inf
    layers_per_cell: tuple[int, ...] = ()
    peak_bytes: int = 0
    """The peak of the largest stage."""
    recomputes: tuple[int, int] = (0, 0)
    """As in ``Plan``."""

    @staticmethod
    def of(pipeline: PipelineSettings, outcome: Plan | PlanError) -> Alternative:
        """Returns the alternative of a planned schedule, or of one that does not fit."""
        if isinstance(outcome, PlanError):
            return Alternative(pipeline, str(outcome))
        peak_bytes = max(cell.peak_bytes for cell in outcome.cells)
        return Alternative(pipeline, "", outcome.step_s, outcome.layers_per_cell, peak_bytes, outcome.recomputes)

    def is_of(self, pipeline: PipelineSettings) -> bool:
        """Whether it is the schedule of these settings."""
        own = self.pipeline
        return (own.schedule, own.virtual_stages) == (pipeline.schedule, pipeline.virtual_stages)


@dataclass(frozen=True)
class Plan:
    """All cells, in the order of layers, and the simulated step."""

    cells: tuple[CellPlan, ...]
    """In the order of the model; most schedules have one cell per stage."""
    problem: Problem
    """As posed, with ``auto`` resolved."""
    schedule_config: ScheduleConfig
    schedule: Schedule
    timeline: Timeline
    cells_problem: CellsProblem
    """That of scheduling these cells."""
    alternatives: tuple[Alternative, ...] = ()
    """The schedules that the settings allow, the plan's own among them; empty until they are compared."""

    @property
    def pipeline(self) -> PipelineSettings:
        return self.problem.pipeline

    @property
    def machine(self) -> Machine:
        return self.problem.machine

    @property
    def layers_per_cell(self) -> tuple[int, ...]:
        return tuple(cell.end - cell.begin for cell in self.cells)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: simulated, or where workers share cores, at least the total compute time."""
        if self.machine.cores is None:
            return self.timeline.seconds
        busy = sum(self.timeline.busy(stage) for stage in range(len(self.timeline.rows)))
        return max(self.timeline.seconds, busy * self.pipeline.replicas / self.machine.cores)

    @cached_property
    def lower_bound_s(self) -> float:
        """A bound of the step of any schedule of these cells. Gradients are reduced over replicas after the backwards,
        as in ``simulate``; a run overlaps them."""
        return step_lower_bound_s(self.cells_problem, lower_bound_s(self.cells_problem), self.problem)

    @property
    def cell_to_stage(self) -> tuple[int, ...]:
        """The stage of each cell; empty for round by round."""
        return self.schedule_config.cell_to_stage(self.pipeline.stages)

    @property
    def recomputes(self) -> tuple[int, int]:
        """How many forwards are recomputed, and how many there are."""
        kinds = Counter(action.kind for actions in self.schedule for action in actions)
        return kinds["R"], kinds["F"]


def make_plan(problem: Problem) -> Plan:
    """Returns the plan of one replica of a run.

    Raises PlanError with every fault: costs, stages, ``layers_per_cell``, schedule, and each stage that does not fit
    its device.
    """

    def outcomes_of(candidates: Iterable[PipelineSettings]) -> list[Plan | PlanError]:
        return [try_schedule(replace(problem, pipeline=candidate)) for candidate in candidates]

    pipeline = problem.pipeline
    named, least = _resolve_schedules(problem)
    outcomes = outcomes_of(named)
    alternatives = [*map(Alternative.of, named, outcomes)]
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    if not plans:
        of_least = [outcome for outcome in outcomes_of(least) if isinstance(outcome, Plan)]
        plans = [replace(plan, problem=plan.problem.with_pipeline(remat=pipeline.remat)) for plan in of_least]
    if not plans:
        raise next(outcome for outcome in outcomes if isinstance(outcome, PlanError))
    fastest = min(plans, key=lambda plan: plan.step_s)  # of equals the first, which is the simplest
    if pipeline.schedule != "auto":
        return fastest
    if fastest.pipeline.schedule == "search":
        alternatives.append(Alternative.of(fastest.pipeline, fastest))
    return replace(fastest, alternatives=tuple(alternatives))


def retimed_step_s(plan: Plan, costs: Sequence[LayerCost]) -> float:
    """Returns the seconds of a plan's step if its layers have other costs: the same cells and schedule."""
    ranges = [range(cell.begin, cell.end) for cell in plan.cells]
    new_costs = MemoryFit(replace(plan.problem, costs=costs)).cell_costs(ranges)
    return replace(plan, timeline=_simulated(plan.schedule, plan.schedule_config, new_costs, plan.problem)).step_s


def _simulated(
    schedule: Schedule, schedule_config: ScheduleConfig, costs: Sequence[CellCost], problem: Problem
) -> Timeline:
    stages, machine, replicas = len(schedule), problem.machine, problem.pipeline.replicas
    flow, cell_to_stage = schedule_config.flow_control(stages), schedule_config.cell_to_stage(stages)
    return simulate(schedule, costs, machine.link, flow, cell_to_stage, machine.norm_all_reduce_s(stages * replicas))


def check_memory(problem: Problem) -> None:
    """Raises PlanError where ``make_plan`` would; no step is simulated."""
    errors: list[PlanError] = []
    for candidate in _memory_candidates(problem):
        try:
            MemoryFit(candidate).cells(problem.machine.memory_limit_bytes)
            return
        except PlanError as error:
            errors.append(error)
    raise errors[0]


def least_limit(problem: Problem, unit: int) -> int | None:
    """Returns the least memory limit, a multiple of ``unit``, for which ``make_plan`` finds a plan, or None."""
    fits = [*map(MemoryFit, _memory_candidates(problem))]

    def enough(limit_bytes: int) -> bool:
        for fit in fits:
            with suppress(PlanError):
                fit.cells(limit_bytes)
                return True
        return False

    limits = range(unit, 2**60, unit)
    at = bisect_left(limits, True, key=enough)
    return limits[at] if at < len(limits) else None


def _memory_candidates(problem: Problem) -> Iterator[Problem]:
    """Yields the problem with each schedule and each cut of the layers that a plan tries."""
    for candidate in chain(*_resolve_schedules(problem)):
        yield replace(problem, pipeline=candidate)
        if candidate.remat == "auto":
            yield replace(problem, pipeline=candidate.model_copy(update={"remat": "never"}))


def _resolve_schedules(problem: Problem) -> tuple[list[PipelineSettings], Iterator[PipelineSettings]]:
    """Returns the settings once for each schedule to try, and for those to try if none of them fits. Raises PlanError
    for contradictory settings."""
    pipeline, layers = problem.pipeline, len(problem.costs)
    with as_plan_error():
        check_costs(problem.costs)
    if wrong := pipeline_errors(pipeline, layers):
        raise PlanError(wrong)
    if recomputes(pipeline.schedule_rows or ()):
        pipeline = pipeline.model_copy(update={"remat": "never"})  # beyond what the rows recompute
    if pipeline.schedule != "auto":
        return [pipeline], iter(())
    return list(candidates(pipeline, layers)), least_candidates(pipeline, layers)


def try_schedule(problem: Problem) -> Plan | PlanError:
    """Returns the plan of one schedule, or why there is none; ``remat=auto`` keeps as many graphs as fit the memory."""
    is_auto = problem.pipeline.remat == "auto"
    if is_auto:  # if all graphs fit, partition for a step without recomputes
        without = try_schedule(problem.with_pipeline(remat="never"))
        if isinstance(without, Plan):
            return without
    try:
        fit = MemoryFit(problem)
        ranges = fit.cells(problem.machine.memory_limit_bytes)
        schedule_config = fit.schedule_config
        if is_auto:
            schedule_config = replace(schedule_config, max_live_graphs=fit.max_live_graphs(ranges))
        return assemble(fit, ranges, schedule_config)
    except PlanError as error:
        return error


def assemble(fit: MemoryFit, ranges: Sequence[range], schedule_config: ScheduleConfig) -> Plan:
    """Returns the plan of given cells and a given schedule. Raises PlanError when the schedule cannot run."""
    costs, pipeline, machine, placement = fit.problem.costs, fit.pipeline, fit.machine, fit.placement
    cells_problem = fit.cells_problem(ranges)
    pairs = tuple(fit.pairs(ranges))
    size = pipeline.stages, pipeline.micro_batches
    with as_plan_error():
        schedule = schedule_config.build(*size)
        try:
            timeline = _simulated(schedule, schedule_config, cells_problem.costs, fit.problem)
        except SettingError:
            replace(schedule_config, pairs=pairs).actions(*size)  # says what is wrong with it
            raise
    peaks, p2p_bytes = fit.peaks(schedule, ranges), fit.p2p_bytes(pairs)
    cells = tuple(
        CellPlan(
            cell[0],
            cell[-1] + 1,
            sum(costs[index].parameters for index in cell),
            cells_problem.costs[at],
            peaks[placement.stage_of(at)],
            machine.process_bytes + p2p_bytes[placement.stage_of(at)],
        )
        for at, cell in enumerate(ranges)
    )
    return Plan(cells, fit.problem, schedule_config, schedule, timeline, cells_problem)


def step_lower_bound_s(cells: CellsProblem, least_s: float, problem: Problem) -> float:
    """Returns a lower bound in seconds for a step with any schedule of these cells, the update included, from the bound
    ``least_s`` without it; where workers share cores, at least their work over the cores."""
    machine, replicas = problem.machine, problem.pipeline.replicas
    updates = [sum(cells.costs[cell].update_s for cell in own) for own in cells.own]
    if any(updates):
        least_s += machine.norm_all_reduce_s(len(updates) * replicas) + max(updates)
    if machine.cores is None:
        return least_s
    work = cells.micro_batches * sum(sum(cost.least_seconds) for cost in cells.costs) + sum(updates)
    return max(least_s, work * replicas / machine.cores)
