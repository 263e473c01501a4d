"""What a run will cost, before it starts: layer costs, cut into cells, fitted to the devices, played as a schedule.

    layer costs -> partition under the memory cap -> schedule, validated -> simulate -> step time, bubble, bytes a stage

The run walks the very schedule that is played here, over the very cells, so a plan can be held against its trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from suite.errors import PlacementError, PlanError, SettingError
from suite.pipeline.costs import LayerCost, check_costs
from suite.pipeline.crossing import messages
from suite.pipeline.memory import CellBytes, peak_bytes
from suite.pipeline.partition import cell_ranges, fewest_stages, partition
from suite.pipeline.schedule import fill_drain, validate
from suite.pipeline.simulate import Link, StageCost, simulate
from suite.pipeline.timeline import Timeline
from suite.settings import PipelineSettings

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a plan knows of the devices: bytes of each, what a worker takes of them for itself, links between them."""

    limit: int
    process: int = 0
    link: Link = field(default_factory=Link)
    reduce_bytes_per_s: float = float("inf")
    """Of the reduction of gradients over replicas."""


@dataclass(frozen=True)
class StagePlan:
    """One stage: its layers ``begin`` to ``end``, exclusive, and what it costs; seconds of one micro-batch."""

    begin: int
    end: int
    parameters: int
    cost: StageCost
    peak_bytes: int


@dataclass(frozen=True)
class Plan:
    """Every stage, and the step as the simulator plays it."""

    stages: tuple[StagePlan, ...]
    pipeline: PipelineSettings
    limit: int
    timeline: Timeline

    @property
    def cells(self) -> tuple[int, ...]:
        """Layers a stage."""
        return tuple(stage.end - stage.begin for stage in self.stages)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.seconds

    @cached_property
    def limit_s(self) -> float:
        """Seconds that no fill-drain step over these cells goes below: sum (F+B) + (M-1) max (F+B+R), and the update.

        Derived from section 2.3 of the paper: a mini-batch passes all stages once, and the slowest stage M times. A
        forward that keeps its graph takes R, not F; and with remat always the first B of all waits for the last
        stage's R, the only rebuild that nothing can hide.
        """
        remat, costs = self.pipeline.remat, [stage.cost for stage in self.stages]
        if remat == "never":
            through = [cost.rebuild_s + cost.backward_s for cost in costs]
            slowest, first_rebuild = max(through), 0.0
        else:
            first_forward = [c.forward_s if remat == "always" else min(c.forward_s, c.rebuild_s) for c in costs]
            through = [forward + cost.backward_s for forward, cost in zip(first_forward, costs, strict=True)]
            slowest = max(cost.forward_s + cost.rebuild_s + cost.backward_s for cost in costs)
            first_rebuild = costs[-1].rebuild_s if remat == "always" else 0.0
        after_first = (self.pipeline.micro_batches - 1) * slowest
        return sum(through) + after_first + first_rebuild + max(cost.update_s for cost in costs)


def make_plan(
    costs: Sequence[LayerCost], layers: int, pipeline: PipelineSettings, per_parameter: float, machine: Machine
) -> Plan:
    """Returns the plan of one replica of a fill-drain run of ``layers`` layers.

    ``per_parameter`` are the bytes that stand for each value (``suite.pipeline.memory.bytes_per_parameter``). Raises
    PlanError with every fault: costs, stages, cells by hand, and each stage that does not fit its device.
    """
    try:
        check_costs(costs, layers)
    except SettingError as fault:
        raise PlanError([str(fault)]) from None
    sizes = CellBytes(costs, pipeline.micro_batches, pipeline.remat, per_parameter, machine.process)
    weights = [_weight(cost, pipeline) for cost in costs]
    ranges = _cells(weights, sizes, pipeline, machine)
    stages = [_stage_cost(costs, sizes, ranges, k, pipeline, machine) for k in range(len(ranges))]
    schedule = fill_drain(pipeline.stages, pipeline.micro_batches, pipeline.remat)
    validate(schedule, pipeline.micro_batches)
    needed = [
        peak_bytes(actions, stage.memory)
        for actions, stage in zip(schedule, stages, strict=True)
        if stage.memory is not None
    ]
    room = f"the device has {machine.limit / GIB:.2f} GiB"
    faults = [
        f"stage {k} (layers {cell[0]}-{cell[-1]}) needs {need / GIB:.2f} GiB, {room}"
        for k, (cell, need) in enumerate(zip(ranges, needed, strict=True))
        if need > machine.limit
    ]
    if faults:
        raise PlanError(faults)
    plans = tuple(
        StagePlan(cell[0], cell[-1] + 1, sum(costs[index].parameters for index in cell), stage, need)
        for cell, stage, need in zip(ranges, stages, needed, strict=True)
    )
    return Plan(plans, pipeline, machine.limit, simulate(schedule, stages, machine.link))


def _weight(cost: LayerCost, pipeline: PipelineSettings) -> float:
    """What a layer adds to its stage for each micro-batch."""
    return cost.rebuild_s + cost.backward_s + (0.0 if pipeline.remat == "never" else cost.forward_s)


def _cells(weights: Sequence[float], sizes: CellBytes, pipeline: PipelineSettings, machine: Machine) -> list[range]:
    """Returns the cells by hand, if they are whole, or the lightest cut that fits."""
    if pipeline.cells is not None:
        faults = []
        if len(pipeline.cells) != pipeline.stages:
            faults.append(f"pipeline.cells names {len(pipeline.cells)} cells, pipeline.stages is {pipeline.stages}")
        try:
            ranges = cell_ranges(pipeline.cells, len(weights))
        except SettingError as fault:
            faults.append(str(fault))
        if faults:
            raise PlanError(faults)
        return ranges
    reach = sizes.reach(machine.limit)
    try:
        return cell_ranges(partition(weights, pipeline.stages, reach), len(weights))
    except PlacementError as fault:
        raise PlanError(_too_large(weights, sizes, pipeline, machine, reach) or [str(fault)]) from None
    except SettingError as fault:
        raise PlanError([str(fault)]) from None


def _too_large(
    weights: Sequence[float], sizes: CellBytes, pipeline: PipelineSettings, machine: Machine, reach: Sequence[int]
) -> list[str]:
    """Returns a sentence for each layer that fits no device alone, or else for each stage of the lightest cut."""
    room = f"the device has {machine.limit / GIB:.2f} GiB"

    def need(begin: int, end: int) -> float:
        return sizes.needs(begin, end) / GIB

    fewest = fewest_stages(reach)
    if fewest is None:
        alone = [at for at, end in enumerate(reach) if end == at]
        worst = max(alone, key=lambda at: need(at, at + 1))
        others = f", and {len(alone) - 1} other layers do not fit either" if len(alone) > 1 else ""
        return [f"layer {worst} alone needs {need(worst, worst + 1):.2f} GiB, {room}{others}"]
    if fewest <= pipeline.stages:  # a layer fits among others, but not as the first of a cell
        return []
    cut = cell_ranges(partition(weights, pipeline.stages), len(weights))
    over = {k: gib for k, cell in enumerate(cut) if (gib := need(cell[0], cell[-1] + 1)) > machine.limit / GIB}
    if not over:
        return []
    worst = max(over, key=over.__getitem__)
    others = f", and {len(over) - 1} other stages too much as well" if len(over) > 1 else ""
    return [
        f"stage {worst} (layers {cut[worst][0]}-{cut[worst][-1]}) needs {over[worst]:.2f} GiB, {room}{others}; "
        f"{fewest} stages are the fewest that fit, {pipeline.stages} were asked for"
    ]


def _stage_cost(
    costs: Sequence[LayerCost], sizes: CellBytes, cells: Sequence[range], k: int, pipeline: PipelineSettings,
    machine: Machine,
) -> StageCost:  # fmt: skip
    inside = [costs[index] for index in cells[k]]
    reduced = 0.0
    if pipeline.replicas > 1:  # a ring passes every gradient twice, but for each worker's own share
        share = 2 * (pipeline.replicas - 1) / pipeline.replicas
        reduced = share * 4 * sum(cost.parameters for cost in inside) / machine.reduce_bytes_per_s
    sent = messages(costs, cells, k)
    before = messages(costs, cells, k - 1) if k else []
    return StageCost(
        forward_s=sum(cost.forward_s for cost in inside),
        rebuild_s=sum(cost.rebuild_s for cost in inside),
        backward_s=sum(cost.backward_s for cost in inside),
        update_s=sum(cost.update_s for cost in inside) + reduced,
        sends=sent[0].sends if sent else 0,
        returns=before[0].returns if before else 0,
        far=tuple(sent[1:]),
        memory=sizes.among(cells, k),
    )
