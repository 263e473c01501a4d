"""Plans a run before it starts: layer costs, partitioned into cells that fit the devices, simulated as a schedule.

    layer costs -> partition under the memory cap -> schedule, validated -> recompute -> simulate -> step, bytes

Where the settings say ``auto``, all schedules are simulated and the fastest that fits is used, and each stage keeps as
many graphs as its memory holds, which minimises recomputes. The run executes the same schedule on the same cells, so a
plan can be compared with its trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from suite.errors import PlacementError, PlanError, SettingError
from suite.pipeline.planning.costs import LayerCost, check_costs
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.memory import UNCOUNTED_BYTES, CellMemory, InFlightPeaks, MemoryModel, peak_bytes
from suite.pipeline.planning.partition import cell_ranges, fewest_stages, partition
from suite.pipeline.planning.simulate import CellCost, Link, Links, simulate
from suite.pipeline.planning.skip_costs import message_costs
from suite.pipeline.schedule.action import Action, Schedule, recomputed_in, virtual_stages_of
from suite.pipeline.schedule.config import MIN_VIRTUAL_STAGES, ScheduleConfig, setting_faults
from suite.pipeline.schedule.flow_control import max_inflight_sends
from suite.pipeline.schedule.remat import UNLIMITED, with_recomputes
from suite.pipeline.schedule.timeline import Timeline
from suite.settings import PipelineSettings, ScheduleName


@dataclass(frozen=True)
class Machine:
    """The devices of a plan: bytes of each, bytes of a worker process, and the links between them."""

    memory_limit_bytes: int
    """The bytes of each device that a plan may use."""
    process_bytes: int = 0
    link: Link | Links = field(default_factory=Link)
    reduce_bytes_per_s: float = float("inf")
    """Of the gradient all-reduce over replicas."""
    cores: int | None = None
    """How many workers compute at once, where several share a device; None: all."""
    reserve: int = 0
    """Bytes of each device beyond the limit, left free."""


@dataclass(frozen=True)
class CellPlan:
    """One cell: its layers ``begin`` to ``end``, exclusive, and its cost for one micro-batch."""

    begin: int
    end: int
    parameters: int
    cost: CellCost
    peak_bytes: int
    """The peak of its stage, with all the stage's cells."""


@dataclass(frozen=True)
class Plan:
    """All cells, in the order of layers, and the simulated step."""

    cells: tuple[CellPlan, ...]
    """Cell v * K + k is the v-th of stage k; most schedules have one cell a stage."""
    pipeline: PipelineSettings
    """As requested, with ``auto`` resolved."""
    schedule_config: ScheduleConfig
    memory_limit_bytes: int
    timeline: Timeline
    cores: int | None = None
    reserve: int = 0
    """Bytes of each device beyond the limit, left free."""

    @property
    def layers_per_cell(self) -> tuple[int, ...]:
        """Layers a cell."""
        return tuple(stage.end - stage.begin for stage in self.cells)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: simulated, or where workers share cores, at least the total compute time."""
        if self.cores is None:
            return self.timeline.seconds
        busy = sum(self.timeline.busy(stage) for stage in range(len(self.timeline.rows)))
        return max(self.timeline.seconds, busy * self.pipeline.replicas / self.cores)

    @cached_property
    def schedule(self) -> Schedule:
        """The actions of each stage."""
        return self.schedule_config.actions(self.pipeline.stages, self.pipeline.micro_batches)

    @property
    def recomputes(self) -> tuple[int, int]:
        """How many forwards are recomputed, and how many there are."""
        kinds = Counter(action.kind for actions in self.schedule for action in actions)
        return kinds["R"], kinds["F"]

    @cached_property
    def step_time_lower_bound_s(self) -> float:
        """A lower bound in seconds for a step of this schedule over these cells: messages are free, and gradients are
        reduced over replicas after the backwards, as in ``simulate``; a run overlaps them."""
        costs = [stage.cost for stage in self.cells]
        stages = self.pipeline.stages
        update = max(sum(cost.update_s for cost in costs[k::stages]) for k in range(stages))
        return step_time_lower_bound_s(self.schedule_config, self.schedule, costs) + update


def step_time_lower_bound_s(schedule_config: ScheduleConfig, schedule: Schedule, costs: Sequence[CellCost]) -> float:
    """Returns a lower bound in seconds for a step of a schedule over cells of these costs, without the update.

    For any schedule: before a stage's first action a forward passes all previous stages, then the stage runs all its
    actions, then a gradient passes the previous stages, unless deferred weight gradients hide that. The bound of
    fill-drain is tighter, sum (F+B) + max of the others' F+B+R: a mini-batch passes all stages once, and the slowest
    stage M times (section 2.3 of the paper). A forward that keeps its graph takes R, not F; and where the last stage
    recomputes everything, the very first B waits for its R, the only one that nothing hides.
    """
    if schedule_config.schedule == "fill_drain":
        return _fill_drain_lower_bound_s(schedule, costs)
    found, before = 0.0, 0.0
    for k, actions in enumerate(schedule):
        busy = sum(
            _seconds(actions, costs[virtual_stage * len(schedule) + k], virtual_stage)
            for virtual_stage in range(schedule_config.virtual_stages)
        )
        found = max(found, before + busy)
        cost = costs[k]
        before += min(cost.forward_s, cost.recompute_s) + (
            0.0 if schedule_config.defers_weight_grads else cost.backward_s
        )
    return found


def _fill_drain_lower_bound_s(schedule: Schedule, costs: Sequence[CellCost]) -> float:
    through = others = 0.0
    for actions, cost in zip(schedule, costs, strict=True):
        count, recompute_count = (sum(action.kind == kind for action in actions) for kind in "FR")
        first = (
            min(cost.forward_s, cost.recompute_s)
            if 0 < recompute_count < count
            else (cost.forward_s if recompute_count else cost.recompute_s)
        )
        through += first + cost.backward_s
        rest = recompute_count if recompute_count < count else count - 1
        both, kept = cost.recompute_s + cost.backward_s, count - 1 - rest
        others = max(others, rest * (cost.forward_s + both) + kept * both)
    count, recompute_count = (sum(action.kind == kind for action in schedule[-1]) for kind in "FR")
    return through + others + (costs[-1].recompute_s if count and recompute_count == count else 0.0)


def _seconds(actions: Sequence[Action], cost: CellCost, virtual_stage: int) -> float:
    """Returns the seconds of all actions of one cell."""
    recomputed = recomputed_in(actions)
    return sum(
        cost.seconds(action.kind, (virtual_stage, action.micro_batch) in recomputed)
        for action in actions
        if action.virtual_stage == virtual_stage
    )


def make_plan(
    costs: Sequence[LayerCost], layers: int, pipeline: PipelineSettings, bytes_per_parameter: float, machine: Machine
) -> Plan:
    """Returns the plan of one replica of a run of ``layers`` layers.

    ``bytes_per_parameter`` is as in ``suite.pipeline.planning.memory``. Raises PlanError with every fault: costs,
    stages, ``layers_per_cell``, schedule, and each stage that does not fit its device.
    """
    plans, first_error = [], None
    for candidate in _resolve_schedules(costs, layers, pipeline):
        try:
            plans.append(_plan_schedule(costs, candidate, bytes_per_parameter, machine))
        except PlanError as error:
            first_error = first_error or error
    if not plans:
        assert first_error is not None
        raise first_error
    return min(plans, key=lambda plan: plan.step_s)  # of equals the first, which is the simplest


def check_memory(
    costs: Sequence[LayerCost], layers: int, pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
) -> None:
    """Raises PlanError where ``make_plan`` would; no step is simulated."""
    first_error = None
    for candidate in _resolve_schedules(costs, layers, pipeline):
        try:
            _Fit(costs, candidate, bytes_per_param, machine).cells(machine)
            return
        except PlanError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _resolve_schedules(costs: Sequence[LayerCost], layers: int, pipeline: PipelineSettings) -> list[PipelineSettings]:
    """Returns the settings once for each schedule to try. Raises PlanError for contradictory settings."""
    try:
        check_costs(costs, layers)
    except SettingError as error:
        raise PlanError([str(error)]) from None
    wrong = setting_faults(pipeline, layers)
    if wrong:
        raise PlanError(wrong)
    return list(_candidates(pipeline, layers)) if pipeline.schedule == "auto" else [pipeline]


def _candidates(pipeline: PipelineSettings, layers: int) -> Iterator[PipelineSettings]:
    """Yields the settings with each schedule that they allow, the simplest first."""
    several = max(MIN_VIRTUAL_STAGES, pipeline.virtual_stages)
    choices: tuple[tuple[ScheduleName, int], ...] = (
        ("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", several), ("zero_bubble", several),
    )  # fmt: skip
    for name, virtual_stages in choices:
        candidate = pipeline.model_copy(update={"schedule": name, "virtual_stages": virtual_stages})
        by_hand = virtual_stages > 1 and pipeline.layers_per_cell is not None
        if not by_hand and not setting_faults(candidate, layers):
            yield candidate


def _plan_schedule(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
) -> Plan:  # fmt: skip
    """Returns the plan of one schedule; ``remat=auto`` keeps as many graphs as fit the memory."""
    if pipeline.remat == "auto":
        with suppress(PlanError):  # if all graphs fit, partition for a step without recomputes
            return _plan_schedule(costs, pipeline.model_copy(update={"remat": "never"}), bytes_per_param, machine)
    stages, count = pipeline.stages, pipeline.micro_batches
    fit = _Fit(costs, pipeline, bytes_per_param, machine)
    ranges = fit.cells(machine)
    cells = [_cell_cost(costs, fit.sizes, ranges, at, pipeline, machine) for at in range(len(ranges))]
    memory = _cell_memory(fit.sizes, ranges, stages, machine)
    schedule_config = fit.schedule_config
    if pipeline.remat == "auto":
        schedule_config = replace(
            schedule_config,
            max_live_graphs=_max_live_graphs(schedule_config, stages, count, memory, machine.memory_limit_bytes),
        )
    try:
        schedule = schedule_config.actions(stages, count)
    except SettingError as error:
        raise PlanError([str(error)]) from None
    needed = list(_peaks(schedule, memory))
    plans = tuple(
        CellPlan(cell[0], cell[-1] + 1, sum(costs[index].parameters for index in cell), cells[at], needed[at % stages])
        for at, cell in enumerate(ranges)
    )
    timeline = simulate(schedule, cells, machine.link)
    return Plan(plans, pipeline, schedule_config, machine.memory_limit_bytes, timeline, machine.cores, machine.reserve)


class _Fit:
    """The memory of one schedule with the most recomputes that the settings allow, for any memory limit."""

    def __init__(
        self, costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine
    ) -> None:
        with_recompute = pipeline.model_copy(update={"remat": "except_last"}) if pipeline.remat == "auto" else pipeline
        self.schedule_config, self._pipeline = ScheduleConfig.from_settings(with_recompute), pipeline
        try:
            self._schedule = self.schedule_config.unchecked(pipeline.stages, pipeline.micro_batches)
        except SettingError as error:
            raise PlanError([str(error)]) from None
        in_flight = InFlightPeaks.of(self._schedule, pipeline.micro_batches)
        self.sizes = MemoryModel(costs, in_flight, bytes_per_param, machine.process_bytes)
        self._weights = [_layer_seconds(cost, with_recompute) for cost in costs]

    def cells(self, machine: Machine) -> list[range]:
        """Returns the most even cells that fit. Raises PlanError with every stage that does not."""
        ranges = _cells(self._weights, self.sizes, self._pipeline, machine, self._schedule)
        needed = _peaks(self._schedule, _cell_memory(self.sizes, ranges, self._pipeline.stages, machine))
        wrong = [
            f"stage {k} (layers {_layers(ranges[k :: self._pipeline.stages])}) needs {need / GIB:.2f} GiB, "
            f"the device has {_in_gib(machine)}"
            for k, need in enumerate(needed)
            if need > machine.memory_limit_bytes
        ]
        if wrong:
            raise PlanError(wrong)
        return ranges


def least_limit(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, bytes_per_param: float, machine: Machine, unit: int
) -> int | None:
    """Returns the least memory limit, a multiple of ``unit``, for which ``make_plan`` finds a plan, or None."""
    fits = []
    for candidate in _resolve_schedules(costs, len(costs), pipeline):
        with suppress(PlanError):
            fits.append(_Fit(costs, candidate, bytes_per_param, machine))

    def enough(units: int) -> bool:
        for fit in fits:
            with suppress(PlanError):
                fit.cells(replace(machine, memory_limit_bytes=units * unit))
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


def _in_gib(machine: Machine) -> str:
    """Returns a device's memory and its usable part as text."""
    if not machine.reserve:
        return f"{machine.memory_limit_bytes / GIB:.2f} GiB"
    total = machine.memory_limit_bytes + machine.reserve
    usable = machine.memory_limit_bytes / GIB
    return f"{total / GIB:.2f} GiB ({usable:.2f} GiB after a reserve of {machine.reserve / total:.0%})"


def _max_live_graphs(
    schedule_config: ScheduleConfig, stages: int, micro_batches: int, memory: Sequence[Sequence[CellMemory]],
    limit_bytes: int,
) -> tuple[int, ...]:  # fmt: skip
    """Returns for each cell the most graphs that fit its stage's memory, by bisection; at least one."""
    bare = schedule_config.without_recompute(stages, micro_batches)
    known: dict[Hashable, int] = {}

    def max_live_graphs(k: int) -> int:
        def fits(count: int) -> bool:
            walk = with_recomputes(bare[k], [count] * schedule_config.virtual_stages)
            return (
                peak_bytes(
                    walk, *memory[k], max_inflight_sends=max_inflight_sends(stages, schedule_config.virtual_stages)
                )
                <= limit_bytes
            )

        if fits(UNLIMITED):
            return UNLIMITED
        least, beyond = 1, max(2, micro_batches)
        while beyond - least > 1:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if fits(middle) else (least, middle)
        return least

    found = []
    for k in range(stages):
        key = (tuple(bare[k]), tuple(memory[k]))  # most stages are equal
        if key not in known:
            known[key] = max_live_graphs(k)
        found.append(known[key])
    return tuple(found) * schedule_config.virtual_stages


def _cell_memory(sizes: MemoryModel, ranges: Sequence[range], stages: int, machine: Machine) -> list[list[CellMemory]]:
    """Returns the memory of each stage's cells; the process counts with its first cell. On a CPU the whole mini-batch
    is always in the memory of stage 0."""
    memory = [sizes.in_partition(ranges, at) for at in range(len(ranges))]
    if machine.cores is not None:
        memory[0] = replace(
            memory[0],
            fixed_bytes=memory[0].fixed_bytes + sizes.in_flight.waiting_micro_batches * memory[0].input_bytes,
        )
    once = machine.process_bytes + UNCOUNTED_BYTES
    memory[stages:] = [replace(cell, fixed_bytes=cell.fixed_bytes - once) for cell in memory[stages:]]
    return [memory[k::stages] for k in range(stages)]


def _peaks(schedule: Schedule, memory: Sequence[Sequence[CellMemory]]) -> Iterator[int]:
    """Yields the peak of each stage."""
    sends_in_flight = max_inflight_sends(len(schedule), virtual_stages_of(schedule))
    return (
        peak_bytes(actions, *cells, max_inflight_sends=sends_in_flight)
        for actions, cells in zip(schedule, memory, strict=True)
    )


def _layers(cells: Sequence[range]) -> str:
    return " and ".join(f"{cell[0]}-{cell[-1]}" for cell in cells)


def _layer_seconds(cost: LayerCost, pipeline: PipelineSettings) -> float:
    """Returns the seconds that a layer adds to its stage for each micro-batch."""
    return cost.recompute_s + cost.backward_s + (0.0 if pipeline.remat == "never" else cost.forward_s)


def _cells(
    weights: Sequence[float], sizes: MemoryModel, pipeline: PipelineSettings, machine: Machine, schedule: Schedule
) -> list[range]:  # fmt: skip
    """Returns the cells of ``layers_per_cell`` if it is set and valid, else the most even partition that fits."""
    count = pipeline.stages * pipeline.virtual_stages
    if pipeline.layers_per_cell is not None:
        wrong = []
        if len(pipeline.layers_per_cell) != count:
            per_stage = f" of {pipeline.virtual_stages} cells each" if pipeline.virtual_stages > 1 else ""
            wrong.append(
                f"pipeline.layers_per_cell names {len(pipeline.layers_per_cell)} cells, "
                f"pipeline.stages is {pipeline.stages}{per_stage}"
            )
        try:
            ranges = cell_ranges(pipeline.layers_per_cell, len(weights))
        except SettingError as error:
            wrong.append(str(error))
        if wrong:
            raise PlanError(wrong)
        return ranges
    furthest_end = sizes.furthest_end(_cell_limit_bytes(pipeline, machine))
    try:
        return cell_ranges(partition(weights, count, furthest_end), len(weights))
    except PlacementError as error:
        # ``furthest_end`` is conservative; the most even partition may fit nevertheless
        lightest = cell_ranges(partition(weights, count), len(weights))
        if all(
            need <= machine.memory_limit_bytes
            for need in _peaks(schedule, _cell_memory(sizes, lightest, pipeline.stages, machine))
        ):
            return lightest
        raise PlanError(_too_large_faults(weights, sizes, pipeline, machine, furthest_end) or [str(error)]) from None
    except SettingError as error:
        raise PlanError([str(error)]) from None


def _cell_limit_bytes(pipeline: PipelineSettings, machine: Machine) -> int:
    """Returns the bytes for one cell: the cells of a stage share its device with one process."""
    return machine.process_bytes + (machine.memory_limit_bytes - machine.process_bytes) // pipeline.virtual_stages


def _too_large_faults(
    weights: Sequence[float],
    sizes: MemoryModel,
    pipeline: PipelineSettings,
    machine: Machine,
    furthest_end: Sequence[int],
) -> list[str]:
    """Returns an error for a layer that does not fit alone, or else for the worst stage of the most even partition."""
    share = _cell_limit_bytes(pipeline, machine)
    room = f"the device has {_in_gib(machine)}"
    if pipeline.virtual_stages > 1:
        room += f", {share / GIB:.2f} GiB for each of {pipeline.virtual_stages} cells"

    def need(begin: int, end: int) -> float:
        return sizes.peak_upper_bound(begin, end) / GIB

    fewest = fewest_stages(furthest_end)
    if fewest is None:
        alone = [at for at, end in enumerate(furthest_end) if end == at]
        worst = max(alone, key=lambda at: need(at, at + 1))
        others = f", and {len(alone) - 1} other layers do not fit either" if len(alone) > 1 else ""
        return [f"layer {worst} alone needs {need(worst, worst + 1):.2f} GiB, {room}{others}"]
    count = pipeline.stages * pipeline.virtual_stages
    if fewest <= count:  # a layer fits inside a cell, but not as its first
        return []
    cut = cell_ranges(partition(weights, count), len(weights))
    over = {k: gib for k, cell in enumerate(cut) if (gib := need(cell[0], cell[-1] + 1)) > share / GIB}
    if not over:
        return []
    worst = max(over, key=over.__getitem__)
    others = f", and {len(over) - 1} other stages too much as well" if len(over) > 1 else ""
    part = "stage" if pipeline.virtual_stages == 1 else "cell"
    message = f"{part} {worst} (layers {cut[worst][0]}-{cut[worst][-1]}) needs {over[worst]:.2f} GiB, {room}{others}"
    if machine.cores is not None:  # with more stages each would get less memory
        return [f"{message}; all stages share the memory of one machine"]
    enough = -(-fewest // pipeline.virtual_stages)
    return [f"{message}; {enough} stages are the fewest that fit, {pipeline.stages} were requested"]


def _cell_cost(
    costs: Sequence[LayerCost], sizes: MemoryModel, cells: Sequence[range], k: int, pipeline: PipelineSettings,
    machine: Machine,
) -> CellCost:  # fmt: skip
    inside = [costs[index] for index in cells[k]]
    reduced = 0.0
    if pipeline.replicas > 1:  # a ring all-reduce sends every gradient twice, except each worker's own share
        share = 2 * (pipeline.replicas - 1) / pipeline.replicas
        reduced = share * 4 * sum(cost.parameters - cost.frozen for cost in inside) / machine.reduce_bytes_per_s
    sent = message_costs(costs, cells, k)
    before = message_costs(costs, cells, k - 1) if k else []
    return CellCost(
        forward_s=sum(cost.forward_s for cost in inside),
        recompute_s=sum(cost.recompute_s for cost in inside),
        backward_s=sum(cost.backward_s for cost in inside),
        weight_grad_s=sum(cost.weight_grad_s for cost in inside),
        split_s=sum(cost.split_s for cost in inside),
        update_s=sum(cost.update_s for cost in inside) + reduced,
        activation_bytes=sent[0].activation_bytes if sent else 0,
        gradient_bytes=before[0].gradient_bytes if before else 0,
        far_messages=tuple(sent[1:]),
        memory=sizes.in_partition(cells, k),
    )
