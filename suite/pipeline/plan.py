"""What a run will cost, before it starts: layer costs, cut into cells, fitted to the devices, played as a schedule.

    layer costs -> partition under the memory cap -> schedule, validated -> rebuild dial -> simulate -> step, bytes

Where the settings leave it to the plan, all schedules are played and the fastest that fits is taken; and each stage
keeps as many graphs as its memory holds, so that no more is rebuilt than must be. The run walks the very schedule that
is played here, over the very cells, so a plan can be held against its trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from suite.errors import PlacementError, PlanError, SettingError
from suite.pipeline.action import Action, Schedule, put_off_in, rebuilt_in, turns_of
from suite.pipeline.costs import LayerCost, check_costs
from suite.pipeline.crossing import messages
from suite.pipeline.memory import SUNDRIES, CellBytes, Crowd, StageBytes, peak_bytes
from suite.pipeline.partition import cell_ranges, fewest_stages, partition
from suite.pipeline.rebuild import ALL, with_rebuilds
from suite.pipeline.recipe import FEWEST_TURNS, Recipe, faults
from suite.pipeline.simulate import Link, Links, StageCost, simulate
from suite.pipeline.timeline import Timeline
from suite.pipeline.transport import outstanding
from suite.settings import PipelineSettings, ScheduleName

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a plan knows of the devices: bytes of each, what a worker takes of them for itself, links between them."""

    limit: int
    """What a plan may use of the memory."""
    process: int = 0
    link: Link | Links = field(default_factory=Link)
    reduce_bytes_per_s: float = float("inf")
    """Of the reduction of gradients over replicas."""
    cores: int | None = None
    """So many workers compute at once, where more than there are devices take turns; None: all."""
    reserve: int = 0
    """Bytes of each device beyond the limit that a plan leaves free."""


@dataclass(frozen=True)
class StagePlan:
    """One cell: its layers ``begin`` to ``end``, exclusive, and what it costs; seconds of one micro-batch."""

    begin: int
    end: int
    parameters: int
    cost: StageCost
    peak_bytes: int
    """Of its stage, with all cells that this holds."""


@dataclass(frozen=True)
class Plan:
    """Every cell, in the order of layers, and the step as the simulator plays it."""

    stages: tuple[StagePlan, ...]
    """Cell v * K + k is the v-th of stage k; most schedules give each stage one."""
    pipeline: PipelineSettings
    """As asked for, but for what was left to the plan."""
    recipe: Recipe
    limit: int
    timeline: Timeline
    cores: int | None = None
    reserve: int = 0
    """Bytes of each device beyond the limit, left free."""

    @property
    def cells(self) -> tuple[int, ...]:
        """Layers a cell."""
        return tuple(stage.end - stage.begin for stage in self.stages)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step: the simulator's, or where workers take turns on cores, all that they compute."""
        if self.cores is None:
            return self.timeline.seconds
        busy = sum(self.timeline.busy(stage) for stage in range(len(self.timeline.rows)))
        return max(self.timeline.seconds, busy * self.pipeline.replicas / self.cores)

    @cached_property
    def schedule(self) -> Schedule:
        """What the stages walk."""
        return self.recipe.actions(self.pipeline.stages, self.pipeline.micro_batches)

    @property
    def rebuilds(self) -> tuple[int, int]:
        """How many forwards are run again for their backward, and how many there are."""
        kinds = Counter(action.kind for actions in self.schedule for action in actions)
        return kinds["R"], kinds["F"]

    @cached_property
    def limit_s(self) -> float:
        """Seconds that no step of this schedule over these cells goes below, messages taking none and gradients leaving
        for the other replicas behind it, as ``simulate`` has it; in a run they leave earlier."""
        costs = [stage.cost for stage in self.stages]
        stages = self.pipeline.stages
        update = max(sum(cost.update_s for cost in costs[k::stages]) for k in range(stages))
        return limit(self.recipe, self.schedule, costs) + update


def limit(recipe: Recipe, schedule: Schedule, costs: Sequence[StageCost]) -> float:
    """Returns seconds that no walk of a schedule over cells of these costs goes below, without the update.

    Whatever the schedule: before a stage's first action a forward must pass all stages before it, then it does all that
    it has to do, and after its last backward a gradient must pass them, but where weights are still left to do
    meanwhile. Fill-drain's is closer,
    sum (F+B) + max of the others' F+B+R: a mini-batch passes all stages once, and the slowest stage M times (section
    2.3 of the paper). There a forward that keeps its graph takes R, not F; and where the last stage rebuilds
    everything, the first B of all waits for its R, the only one that nothing can hide.
    """
    if recipe.schedule == "fill_drain":
        return _fill_drain_limit(schedule, costs)
    found, before = 0.0, 0.0
    for k, actions in enumerate(schedule):
        busy = sum(_seconds(actions, costs[turn * len(schedule) + k], turn) for turn in range(recipe.turns))
        found = max(found, before + busy)
        cost = costs[k]
        before += min(cost.forward_s, cost.rebuild_s) + (0.0 if recipe.splits else cost.backward_s)
    return found


def _fill_drain_limit(schedule: Schedule, costs: Sequence[StageCost]) -> float:
    through = others = 0.0
    for actions, cost in zip(schedule, costs, strict=True):
        count, again = (sum(action.kind == kind for action in actions) for kind in "FR")
        first = (
            min(cost.forward_s, cost.rebuild_s) if 0 < again < count else (cost.forward_s if again else cost.rebuild_s)
        )
        through += first + cost.backward_s
        rest = again if again < count else count - 1
        both, kept = cost.rebuild_s + cost.backward_s, count - 1 - rest
        others = max(others, rest * (cost.forward_s + both) + kept * both)
    count, again = (sum(action.kind == kind for action in schedule[-1]) for kind in "FR")
    return through + others + (costs[-1].rebuild_s if count and again == count else 0.0)


def _seconds(actions: Sequence[Action], cost: StageCost, turn: int) -> float:
    """Returns the seconds that one cell keeps its stage busy."""
    rebuilt, put_off = rebuilt_in(actions), put_off_in(actions)
    return sum(
        cost.seconds(action.kind, (turn, action.micro_batch) in rebuilt, (turn, action.micro_batch) in put_off)
        for action in actions
        if action.turn == turn
    )


def make_plan(
    costs: Sequence[LayerCost], layers: int, pipeline: PipelineSettings, per_parameter: float, machine: Machine
) -> Plan:
    """Returns the plan of one replica of a run of ``layers`` layers.

    ``per_parameter`` are the bytes that stand for each value (``suite.pipeline.memory.bytes_per_parameter``). Raises
    PlanError with every fault: costs, stages, cells by hand, schedule, and each stage that does not fit its device.
    """
    plans, refused = [], None
    for candidate in _asked_for(costs, layers, pipeline):
        try:
            plans.append(_one_plan(costs, candidate, per_parameter, machine))
        except PlanError as fault:
            refused = refused or fault
    if not plans:
        assert refused is not None
        raise refused
    return min(plans, key=lambda plan: plan.step_s)  # of equals the first, which is the simplest


def check_memory(
    costs: Sequence[LayerCost], layers: int, pipeline: PipelineSettings, per_parameter: float, machine: Machine
) -> None:
    """Raises PlanError where ``make_plan`` would; no step is simulated."""
    refused = None
    for candidate in _asked_for(costs, layers, pipeline):
        try:
            _Fit(costs, candidate, per_parameter, machine).cells(machine)
            return
        except PlanError as fault:
            refused = refused or fault
    assert refused is not None
    raise refused


def _asked_for(costs: Sequence[LayerCost], layers: int, pipeline: PipelineSettings) -> list[PipelineSettings]:
    """Returns the settings with each schedule that they leave open. Raises PlanError for what contradicts itself."""
    try:
        check_costs(costs, layers)
    except SettingError as fault:
        raise PlanError([str(fault)]) from None
    wrong = faults(pipeline, layers)
    if wrong:
        raise PlanError(wrong)
    return list(_candidates(pipeline, layers)) if pipeline.schedule == "auto" else [pipeline]


def _candidates(pipeline: PipelineSettings, layers: int) -> Iterator[PipelineSettings]:
    """Yields the settings with each schedule that they can be walked by, the simplest first."""
    several = max(FEWEST_TURNS, pipeline.turns)
    choices: tuple[tuple[ScheduleName, int], ...] = (
        ("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", several), ("zero_bubble", several),
    )  # fmt: skip
    for name, turns in choices:
        candidate = pipeline.model_copy(update={"schedule": name, "turns": turns})
        by_hand = turns > 1 and pipeline.cells is not None
        if not by_hand and not faults(candidate, layers):
            yield candidate


def _one_plan(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, per_parameter: float, machine: Machine
) -> Plan:  # fmt: skip
    """Returns the plan of one schedule; a rebuild dial left to the plan is turned as far as the memory allows."""
    if pipeline.remat == "auto":
        with suppress(PlanError):  # with memory to spare nothing is rebuilt, and the cells are cut for that
            return _one_plan(costs, pipeline.model_copy(update={"remat": "never"}), per_parameter, machine)
    stages, count = pipeline.stages, pipeline.micro_batches
    fit = _Fit(costs, pipeline, per_parameter, machine)
    ranges = fit.cells(machine)
    cells = [_stage_cost(costs, fit.sizes, ranges, at, pipeline, machine) for at in range(len(ranges))]
    held = _held(fit.sizes, ranges, stages, machine)
    recipe = fit.recipe
    if pipeline.remat == "auto":
        recipe = replace(recipe, graphs=_dialled(recipe, stages, count, held, machine.limit))
    try:
        schedule = recipe.actions(stages, count)
    except SettingError as fault:
        raise PlanError([str(fault)]) from None
    needed = list(_peaks(schedule, held))
    plans = tuple(
        StagePlan(cell[0], cell[-1] + 1, sum(costs[index].parameters for index in cell), cells[at], needed[at % stages])
        for at, cell in enumerate(ranges)
    )
    timeline = simulate(schedule, cells, machine.link)
    return Plan(plans, pipeline, recipe, machine.limit, timeline, machine.cores, machine.reserve)


class _Fit:
    """The bytes of one schedule, rebuilt as much as the settings allow, to be held against any memory."""

    def __init__(
        self, costs: Sequence[LayerCost], pipeline: PipelineSettings, per_parameter: float, machine: Machine
    ) -> None:
        frugal = pipeline.model_copy(update={"remat": "except_last"}) if pipeline.remat == "auto" else pipeline
        self.recipe, self._pipeline = Recipe.of(frugal), pipeline
        try:
            self._schedule = self.recipe.unchecked(pipeline.stages, pipeline.micro_batches)
        except SettingError as fault:
            raise PlanError([str(fault)]) from None
        crowd = Crowd.of(self._schedule, pipeline.micro_batches)
        self.sizes = CellBytes(costs, crowd, per_parameter, machine.process)
        self._weights = [_weight(cost, frugal) for cost in costs]

    def cells(self, machine: Machine) -> list[range]:
        """Returns the lightest cells that fit. Raises PlanError with every stage that does not."""
        ranges = _cells(self._weights, self.sizes, self._pipeline, machine, self._schedule)
        needed = _peaks(self._schedule, _held(self.sizes, ranges, self._pipeline.stages, machine))
        wrong = [
            f"stage {k} (layers {_layers(ranges[k :: self._pipeline.stages])}) needs {need / GIB:.2f} GiB, "
            f"the device has {_in_gib(machine)}"
            for k, need in enumerate(needed)
            if need > machine.limit
        ]
        if wrong:
            raise PlanError(wrong)
        return ranges


def least_limit(
    costs: Sequence[LayerCost], pipeline: PipelineSettings, per_parameter: float, machine: Machine, unit: int
) -> int | None:
    """Returns the fewest bytes a device, a multiple of ``unit``, in which ``make_plan`` finds a plan; None: none do."""
    fits = []
    for candidate in _asked_for(costs, len(costs), pipeline):
        with suppress(PlanError):
            fits.append(_Fit(costs, candidate, per_parameter, machine))

    def enough(units: int) -> bool:
        for fit in fits:
            with suppress(PlanError):
                fit.cells(replace(machine, limit=units * unit))
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
    """Returns the bytes of a device, and what a plan may use of them, in words."""
    if not machine.reserve:
        return f"{machine.limit / GIB:.2f} GiB"
    whole = machine.limit + machine.reserve
    return f"{whole / GIB:.2f} GiB ({machine.limit / GIB:.2f} GiB after a reserve of {machine.reserve / whole:.0%})"


def _dialled(
    recipe: Recipe, stages: int, micro_batches: int, held: Sequence[Sequence[StageBytes]], most: int
) -> tuple[int, ...]:  # fmt: skip
    """Returns for each cell as many graphs as its stage's memory holds, by bisection; one at least."""
    bare = recipe.bare(stages, micro_batches)
    known: dict[Hashable, int] = {}

    def graphs(k: int) -> int:
        def fits(count: int) -> bool:
            walk = with_rebuilds(bare[k], [count] * recipe.turns)
            return peak_bytes(walk, *held[k], unsent=outstanding(stages, recipe.turns)) <= most

        if fits(ALL):
            return ALL
        least, beyond = 1, max(2, micro_batches)
        while beyond - least > 1:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if fits(middle) else (least, middle)
        return least

    found = []
    for k in range(stages):
        key = (tuple(bare[k]), tuple(held[k]))  # most stages are alike
        if key not in known:
            known[key] = graphs(k)
        found.append(known[key])
    return tuple(found) * recipe.turns


def _held(sizes: CellBytes, ranges: Sequence[range], stages: int, machine: Machine) -> list[list[StageBytes]]:
    """Returns the bytes of each stage's cells; the process itself counts with the first. Where host and device are one,
    the whole mini-batch stands before the first cell all the while."""
    held = [sizes.among(ranges, at) for at in range(len(ranges))]
    if machine.cores is not None:
        held[0] = replace(held[0], fixed=held[0].fixed + sizes.crowd.waiting * held[0].inputs)
    once = machine.process + SUNDRIES
    held[stages:] = [replace(one, fixed=one.fixed - once) for one in held[stages:]]
    return [held[k::stages] for k in range(stages)]


def _peaks(schedule: Schedule, held: Sequence[Sequence[StageBytes]]) -> Iterator[int]:
    """Yields the peak of each stage."""
    unsent = outstanding(len(schedule), turns_of(schedule))
    return (peak_bytes(actions, *cells, unsent=unsent) for actions, cells in zip(schedule, held, strict=True))


def _layers(cells: Sequence[range]) -> str:
    return " and ".join(f"{cell[0]}-{cell[-1]}" for cell in cells)


def _weight(cost: LayerCost, pipeline: PipelineSettings) -> float:
    """What a layer adds to its stage for each micro-batch."""
    return cost.rebuild_s + cost.backward_s + (0.0 if pipeline.remat == "never" else cost.forward_s)


def _cells(
    weights: Sequence[float], sizes: CellBytes, pipeline: PipelineSettings, machine: Machine, schedule: Schedule
) -> list[range]:  # fmt: skip
    """Returns the cells by hand, if they are whole, or the lightest cut that fits."""
    count = pipeline.stages * pipeline.turns
    if pipeline.cells is not None:
        wrong = []
        if len(pipeline.cells) != count:
            held = f" of {pipeline.turns} cells each" if pipeline.turns > 1 else ""
            wrong.append(
                f"pipeline.cells names {len(pipeline.cells)} cells, pipeline.stages is {pipeline.stages}{held}"
            )
        try:
            ranges = cell_ranges(pipeline.cells, len(weights))
        except SettingError as fault:
            wrong.append(str(fault))
        if wrong:
            raise PlanError(wrong)
        return ranges
    reach = sizes.reach(_share(pipeline, machine))
    try:
        return cell_ranges(partition(weights, count, reach), len(weights))
    except PlacementError as fault:
        # what reaches how far is a bound; the lightest of all cuts may fit all the same
        lightest = cell_ranges(partition(weights, count), len(weights))
        if all(need <= machine.limit for need in _peaks(schedule, _held(sizes, lightest, pipeline.stages, machine))):
            return lightest
        raise PlanError(_too_large(weights, sizes, pipeline, machine, reach) or [str(fault)]) from None
    except SettingError as fault:
        raise PlanError([str(fault)]) from None


def _share(pipeline: PipelineSettings, machine: Machine) -> int:
    """Returns the bytes for a cell: those of a stage share its device, of which the process takes its part once."""
    return machine.process + (machine.limit - machine.process) // pipeline.turns


def _too_large(
    weights: Sequence[float], sizes: CellBytes, pipeline: PipelineSettings, machine: Machine, reach: Sequence[int]
) -> list[str]:
    """Returns a sentence for each layer that fits no device alone, or else for each stage of the lightest cut."""
    share = _share(pipeline, machine)
    room = f"the device has {_in_gib(machine)}"
    if pipeline.turns > 1:
        room += f", {share / GIB:.2f} GiB for each of {pipeline.turns} cells"

    def need(begin: int, end: int) -> float:
        return sizes.needs(begin, end) / GIB

    fewest = fewest_stages(reach)
    if fewest is None:
        alone = [at for at, end in enumerate(reach) if end == at]
        worst = max(alone, key=lambda at: need(at, at + 1))
        others = f", and {len(alone) - 1} other layers do not fit either" if len(alone) > 1 else ""
        return [f"layer {worst} alone needs {need(worst, worst + 1):.2f} GiB, {room}{others}"]
    count = pipeline.stages * pipeline.turns
    if fewest <= count:  # a layer fits among others, but not as the first of a cell
        return []
    cut = cell_ranges(partition(weights, count), len(weights))
    over = {k: gib for k, cell in enumerate(cut) if (gib := need(cell[0], cell[-1] + 1)) > share / GIB}
    if not over:
        return []
    worst = max(over, key=over.__getitem__)
    others = f", and {len(over) - 1} other stages too much as well" if len(over) > 1 else ""
    part = "stage" if pipeline.turns == 1 else "cell"
    told = f"{part} {worst} (layers {cut[worst][0]}-{cut[worst][-1]}) needs {over[worst]:.2f} GiB, {room}{others}"
    if machine.cores is not None:  # more stages would get less memory each
        return [f"{told}; all stages share the memory of one machine"]
    enough = -(-fewest // pipeline.turns)
    return [f"{told}; {enough} stages are the fewest that fit, {pipeline.stages} were asked for"]


def _stage_cost(
    costs: Sequence[LayerCost], sizes: CellBytes, cells: Sequence[range], k: int, pipeline: PipelineSettings,
    machine: Machine,
) -> StageCost:  # fmt: skip
    inside = [costs[index] for index in cells[k]]
    reduced = 0.0
    if pipeline.replicas > 1:  # a ring passes every gradient twice, but for each worker's own share
        share = 2 * (pipeline.replicas - 1) / pipeline.replicas
        reduced = share * 4 * sum(cost.parameters - cost.frozen for cost in inside) / machine.reduce_bytes_per_s
    sent = messages(costs, cells, k)
    before = messages(costs, cells, k - 1) if k else []
    return StageCost(
        forward_s=sum(cost.forward_s for cost in inside),
        rebuild_s=sum(cost.rebuild_s for cost in inside),
        backward_s=sum(cost.backward_s for cost in inside),
        weight_s=sum(cost.weight_s for cost in inside),
        split_s=sum(cost.split_s for cost in inside),
        update_s=sum(cost.update_s for cost in inside) + reduced,
        sends=sent[0].sends if sent else 0,
        returns=before[0].returns if before else 0,
        far=tuple(sent[1:]),
        memory=sizes.among(cells, k),
    )
