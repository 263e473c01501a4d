"""Plans a run before it starts: layer costs, partitioned into cells that fit the devices, simulated as a schedule.

    layer costs -> partition under the memory limit -> live-graph limit -> schedule, validated -> simulate -> step

Where the settings say ``auto``, all schedules are simulated and the fastest that fits is used, and each stage keeps as
many graphs as its memory holds, which minimises recomputes. The run executes the same schedule on the same cells, so a
plan can be compared with its trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from suite.errors import PlanError, SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import CellPair
from suite.pipeline.planning.costs import LayerCost, check_costs
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.lower_bound import lower_bound_s
from suite.pipeline.planning.partial_schedule import SchedulingProblem
from suite.pipeline.planning.simulate import CellCost, cell_costs, simulate
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.config import MIN_VIRTUAL_STAGES, ScheduleConfig, pipeline_errors
from suite.pipeline.schedule.csv_file import recomputes
from suite.pipeline.schedule.timeline import Timeline
from suite.settings import PipelineSettings, ScheduleName


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
    """A schedule that the settings allow: what a plan of it takes, or why it does not fit."""

    schedule: ScheduleName
    virtual_stages: int
    step_s: float = 0.0
    peak_bytes: int = 0
    """Of the largest stage."""
    recomputes: tuple[int, int] = (0, 0)
    """As in ``Plan``."""
    fault: str = ""
    """Empty if it fits."""

    @staticmethod
    def of(pipeline: PipelineSettings, outcome: Plan | PlanError) -> Alternative:
        """Returns the alternative of a planned schedule, or of one that does not fit."""
        name = pipeline.schedule, pipeline.virtual_stages
        if isinstance(outcome, PlanError):
            return Alternative(*name, fault=str(outcome))
        peak_bytes = max(cell.peak_bytes for cell in outcome.cells)
        return Alternative(*name, outcome.step_s, peak_bytes, outcome.recomputes)

    def is_of(self, pipeline: PipelineSettings) -> bool:
        """Whether it is the schedule of these settings."""
        return (self.schedule, self.virtual_stages) == (pipeline.schedule, pipeline.virtual_stages)


@dataclass(frozen=True)
class Plan:
    """All cells, in the order of layers, and the simulated step."""

    cells: tuple[CellPlan, ...]
    """In the order of the model; most schedules have one cell a stage."""
    pipeline: PipelineSettings
    """As requested, with ``auto`` resolved."""
    schedule_config: ScheduleConfig
    schedule: Schedule
    """The actions of each stage."""
    memory_limit_bytes: int
    timeline: Timeline
    lower_bound_s: float
    """Of a step of any schedule of these cells in this memory. Gradients are reduced over replicas after the backwards,
    as in ``simulate``; a run overlaps them."""
    cores: int | None = None
    reserve: int = 0
    """Bytes of each device beyond the limit, left free."""
    alternatives: tuple[Alternative, ...] = ()
    """The schedules that the settings allow, the plan's own among them; empty until they are compared."""

    @property
    def layers_per_cell(self) -> tuple[int, ...]:
        """Layers a cell."""
        return tuple(cell.end - cell.begin for cell in self.cells)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: simulated, or where workers share cores, at least the total compute time."""
        if self.cores is None:
            return self.timeline.seconds
        busy = sum(self.timeline.busy(stage) for stage in range(len(self.timeline.rows)))
        return max(self.timeline.seconds, busy * self.pipeline.replicas / self.cores)

    @property
    def owners(self) -> tuple[int, ...]:
        """The stage of each cell, as ``CellPlacement`` has them."""
        return self.schedule_config.owners(self.pipeline.stages)

    @property
    def excess(self) -> float:
        """By which share the step may be longer than that of the fastest schedule of these cells in this memory."""
        return max(0.0, self.step_s / self.lower_bound_s - 1) if self.lower_bound_s else 0.0

    @property
    def recomputes(self) -> tuple[int, int]:
        """How many forwards are recomputed, and how many there are."""
        kinds = Counter(action.kind for actions in self.schedule for action in actions)
        return kinds["R"], kinds["F"]


def make_plan(costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine) -> Plan:
    """Returns the plan of one replica of a run of layers of these costs.

    ``bytes_per_param`` is as in ``suite.pipeline.planning.memory``; of 8 or more, 4 are the gradient's. Raises
    PlanError with every fault: costs, stages, ``layers_per_cell``, schedule, and each stage that does not fit its
    device.
    """
    tried = _resolve_schedules(costs, pipeline)
    outcomes = [try_schedule(costs, candidate, bytes_per_param, machine) for candidate in tried]
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    if not plans:
        raise next(outcome for outcome in outcomes if isinstance(outcome, PlanError))
    fastest = min(plans, key=lambda plan: plan.step_s)  # of equals the first, which is the simplest
    if pipeline.schedule != "auto":
        return fastest
    return replace(fastest, alternatives=tuple(map(Alternative.of, tried, outcomes)))


def retimed_step_s(plan: Plan, costs: Sequence[LayerCost], machine: Machine) -> float:
    """Returns the seconds of a plan's step if its layers have other costs: the same cells and schedule."""
    ranges = [range(cell.begin, cell.end) for cell in plan.cells]
    new_costs = plan_costs(costs, ranges, plan.schedule_config.placement(plan.pipeline.stages), plan.pipeline, machine)
    timeline = _simulated(plan.schedule, plan.schedule_config, new_costs, plan.pipeline, machine)
    return replace(plan, timeline=timeline).step_s


def _simulated(
    schedule: Schedule,
    schedule_config: ScheduleConfig,
    costs: Sequence[CellCost],
    pipeline: PipelineSettings,
    machine: Machine,
) -> Timeline:
    stages = len(schedule)
    flow, owners = schedule_config.flow_control(stages), schedule_config.owners(stages)
    return simulate(schedule, costs, machine.link, flow, owners, machine.agreement_s(stages * pipeline.replicas))


def check_memory(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
) -> None:
    """Raises PlanError where ``make_plan`` would; no step is simulated."""
    errors: list[PlanError] = []
    for candidate in _resolve_schedules(costs, pipeline):
        try:
            MemoryFit(costs, candidate, bytes_per_param, machine).cells(machine.memory_limit_bytes)
            return
        except PlanError as error:
            errors.append(error)
    raise errors[0]


def least_limit(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine, unit: int
) -> int | None:
    """Returns the least memory limit, a multiple of ``unit``, for which ``make_plan`` finds a plan, or None."""
    fits = []
    for candidate in _resolve_schedules(costs, pipeline):
        with suppress(PlanError):
            fits.append(MemoryFit(costs, candidate, bytes_per_param, machine))

    def enough(units: int) -> bool:
        for fit in fits:
            with suppress(PlanError):
                fit.cells(units * unit)
                return True
        return False

    most = 1
    while not enough(most):
        if most * unit > 2**60:
            return None
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most * unit


def _resolve_schedules(costs: Sequence[LayerCost], pipeline: PipelineSettings) -> list[PipelineSettings]:
    """Returns the settings once for each schedule to try. Raises PlanError for contradictory settings."""
    try:
        check_costs(costs)
    except SettingError as error:
        raise PlanError([str(error)]) from None
    wrong = pipeline_errors(pipeline, len(costs))
    if wrong:
        raise PlanError(wrong)
    if recomputes(pipeline.schedule_rows or ()):
        pipeline = pipeline.model_copy(update={"remat": "never"})  # beyond what the rows recompute
    return list(candidates(pipeline, len(costs))) if pipeline.schedule == "auto" else [pipeline]


def candidates(pipeline: PipelineSettings, layers: int) -> Iterator[PipelineSettings]:
    """Yields the settings with each schedule that they allow, the simplest first."""
    several = max(MIN_VIRTUAL_STAGES, pipeline.virtual_stages)
    choices: tuple[tuple[ScheduleName, int], ...] = (
        ("fill_drain", 1),
        ("1f1b", 1),
        ("zero_bubble", 1),
        ("interleaved", several),
        ("zero_bubble", several),
        ("zbv", 2),
        ("v_half", 2),
        ("v_min", 2),
    )
    for name, virtual_stages in choices:
        update = {"schedule": name, "schedule_rows": None, "virtual_stages": virtual_stages}
        candidate = pipeline.model_copy(update=update)
        by_hand = virtual_stages > 1 and pipeline.layers_per_cell is not None
        if not by_hand and not pipeline_errors(candidate, layers):
            yield candidate


def try_schedule(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
) -> Plan | PlanError:
    """Returns the plan of one schedule, or why there is none."""
    try:
        return _plan_schedule(costs, pipeline, bytes_per_param, machine)
    except PlanError as error:
        return error


def _plan_schedule(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
) -> Plan:
    """Returns the plan of one schedule; ``remat=auto`` keeps as many graphs as fit the memory."""
    if pipeline.remat == "auto":
        with suppress(PlanError):  # if all graphs fit, partition for a step without recomputes
            return _plan_schedule(costs, pipeline.model_copy(update={"remat": "never"}), bytes_per_param, machine)
    fit = MemoryFit(costs, pipeline, bytes_per_param, machine)
    ranges = fit.cells(machine.memory_limit_bytes)
    schedule_config = fit.schedule_config
    if pipeline.remat == "auto":
        schedule_config = replace(schedule_config, max_live_graphs=fit.max_live_graphs(fit.stage_memories(ranges)))
    return assemble(costs, pipeline, fit, ranges, schedule_config, machine)


def assemble(
    costs: Sequence[LayerCost],
    pipeline: PipelineSettings,
    fit: MemoryFit,
    ranges: Sequence[range],
    schedule_config: ScheduleConfig,
    machine: Machine,
) -> Plan:
    """Returns the plan of given cells and a given schedule. Raises PlanError when the schedule cannot run."""
    placement = schedule_config.placement(pipeline.stages)
    of_cells = plan_costs(costs, ranges, placement, pipeline, machine)
    try:
        checked = replace(schedule_config, pairs=_pairs(of_cells, placement))
        schedule = checked.actions(pipeline.stages, pipeline.micro_batches)
    except SettingError as error:
        raise PlanError([str(error)]) from None
    memory, p2p_bytes = fit.stage_memories(ranges), fit.p2p_bytes(ranges)
    peaks = list(fit.peaks(schedule, memory))
    cells = tuple(
        CellPlan(
            cell[0],
            cell[-1] + 1,
            sum(costs[index].parameters for index in cell),
            of_cells[at],
            peaks[placement.stage_of(at)],
            machine.process_bytes + p2p_bytes[placement.stage_of(at)],
        )
        for at, cell in enumerate(ranges)
    )
    timeline = _simulated(schedule, schedule_config, of_cells, pipeline, machine)
    bound = step_lower_bound_s(placement, pipeline, of_cells, fit, ranges, machine)
    return Plan(
        cells,
        pipeline,
        schedule_config,
        schedule,
        machine.memory_limit_bytes,
        timeline,
        bound,
        machine.cores,
        machine.reserve,
    )


def step_lower_bound_s(
    placement: CellPlacement,
    pipeline: PipelineSettings,
    costs: Sequence[CellCost],
    fit: MemoryFit,
    ranges: Sequence[range],
    machine: Machine,
) -> float:
    """Returns a lower bound in seconds for a step with any schedule of these cells, the update included; where workers
    share cores, at least their work over the cores."""
    count, memory = pipeline.micro_batches, fit.stage_memories(ranges, with_waiting=False)
    problem = SchedulingProblem(placement, count, costs, machine.link, memory, machine.memory_limit_bytes)
    updates = [sum(cost.update_s for cost in placement.on_stage(k, costs)) for k in range(placement.stages)]
    bound = lower_bound_s(problem)
    if any(updates):
        bound += machine.agreement_s(placement.stages * pipeline.replicas) + max(updates)
    if machine.cores is None:
        return bound
    work = count * sum(map(sum, problem.least_s)) + sum(updates)
    return max(bound, work * pipeline.replicas / machine.cores)


def _pairs(cells: Sequence[CellCost], placement: CellPlacement) -> tuple[CellPair, ...]:
    """Returns the pairs of cells that exchange messages."""
    neighbours = [(at, at + 1) for at in range(len(cells) - 1)]
    far = [(at, message.to) for at, cell in enumerate(cells) for message in cell.far_messages]
    return tuple((source, target) for source, target in neighbours + far if placement.crosses(source, target))


def plan_costs(
    costs: Sequence[LayerCost],
    ranges: Sequence[range],
    placement: CellPlacement,
    pipeline: PipelineSettings,
    machine: Machine,
) -> list[CellCost]:
    """Returns the costs of a plan's cells."""
    return cell_costs(costs, ranges, placement, machine.link, pipeline.replicas, machine.reduce_bytes_per_s)
