"""Cells and recomputes that fit the devices' memory, for one schedule.

    layer costs, recomputes of the settings -> cells, as even as fit -> ``remat=auto``: as many graphs as fit

A stage's cells share its device, and one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from suite.errors import PlacementError, PlanError, SettingError
from suite.pipeline.model.topology import CellPair
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import GIB, Machine, p2p_communicators
from suite.pipeline.planning.memory import GRADIENT_BYTES, UNCOUNTED_BYTES, CellBound, MemoryModel
from suite.pipeline.planning.partition import cell_ranges, fewest_cells, partition, with_even_stages
from suite.pipeline.planning.policies import CellsProblem
from suite.pipeline.planning.simulate import CellCost, cell_costs
from suite.pipeline.planning.stage_bytes import CellBytes, largest_rows, peak_bytes, peak_terms
from suite.pipeline.runtime.skip import Skip, communicating_pairs
from suite.pipeline.schedule.action import Action, Schedule
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED, with_recomputes
from suite.settings import PipelineSettings


@contextmanager
def as_plan_error() -> Iterator[None]:
    """A context in which a SettingError becomes a PlanError."""
    try:
        yield
    except SettingError as error:
        raise PlanError([str(error)]) from None


@dataclass(frozen=True)
class Problem:
    """One replica of a run, on devices of one kind."""

    costs: Sequence[LayerCost]
    """The cost of each layer for one micro-batch."""
    pipeline: PipelineSettings
    bytes_per_parameter: float
    """As in ``suite.pipeline.planning.memory``; of 8 or more, 4 are the gradient's."""
    machine: Machine

    def with_pipeline(self, **changes: Any) -> Problem:
        """Returns the problem with other settings of its pipeline."""
        return replace(self, pipeline=self.pipeline.model_copy(update=changes))


class MemoryFit:
    """The memory of one schedule with the most recomputes that the settings allow, for any memory limit."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.pipeline, self.machine = problem, problem.pipeline, problem.machine
        costs, pipeline = problem.costs, problem.pipeline
        with_recompute = pipeline.model_copy(update={"remat": "except_last"}) if pipeline.remat == "auto" else pipeline
        self.schedule_config = ScheduleConfig.from_settings(with_recompute, problem.machine.transport)
        self.placement = self.schedule_config.placement(pipeline.stages)
        self.flow = self.schedule_config.flow_control(pipeline.stages)
        self._count = pipeline.stages * pipeline.virtual_stages
        """The number of cells."""
        each = problem.bytes_per_parameter
        gradient_bytes = GRADIENT_BYTES if each >= 2 * GRADIENT_BYTES else 0  # weight and gradient
        self._memory = MemoryModel(costs, pipeline.micro_batches, each, gradient_bytes)
        self._skips = [
            Skip("", index - popped.span, index) for index, cost in enumerate(costs) for popped in cost.skip_inputs
        ]
        recomputes = with_recompute.remat != "never"
        self._seconds = [cost.recompute_s + cost.backward_s + cost.forward_s * recomputes for cost in costs]
        """What each layer adds to its stage for each micro-batch."""

    @cached_property
    def _schedule(self) -> Schedule:
        with as_plan_error():
            return self.schedule_config.build(self.pipeline.stages, self.pipeline.micro_batches)

    def cells(self, limit_bytes: int) -> list[range]:
        """Returns the cells of ``layers_per_cell``, or the most even ones that fit. Raises PlanError with every stage
        that does not."""
        by_hand = self.pipeline.layers_per_cell
        with as_plan_error():
            layers_per_cell = self.most_even_partition() if by_hand is None else by_hand
        ranges = self._ranges_of(layers_per_cell)
        wrong = self._too_large(ranges, limit_bytes)
        if wrong and by_hand is None:
            ranges = self._most_even_that_fit(limit_bytes, ranges)
            wrong = self._too_large(ranges, limit_bytes)
        if wrong:
            raise PlanError(wrong)
        return ranges

    def _too_large(self, ranges: Sequence[range], limit_bytes: int) -> list[str]:
        """Returns a fault for each stage that does not fit."""
        return [
            f"stage {k} (layers {_layers(self.placement.on_stage(k, ranges))}) needs {need / GIB:.2f} GiB, "
            f"the device has {self._in_gib(limit_bytes)}"
            for k, need in enumerate(self.peaks(self._schedule, ranges))
            if need > limit_bytes
        ]

    def stage_bytes(self, ranges: Sequence[range]) -> list[list[CellBytes]]:
        """Returns the bytes of each stage's cells; the process and its communicators count with its first cell. On a
        CPU the whole mini-batch is always in the memory of stage 0."""
        cells = self._memory.in_partition(ranges, self.placement)
        if self.machine.cores is not None:
            inputs = self.pipeline.micro_batches * cells[0].input_bytes
            cells[0] = replace(cells[0], fixed_bytes=cells[0].fixed_bytes + inputs, input_bytes=0)
        stages = []
        for stage, p2p_bytes in enumerate(self.p2p_bytes(self.pairs(ranges))):
            first, *others = self.placement.on_stage(stage, cells)
            fixed_bytes = first.fixed_bytes + self._process_bytes + p2p_bytes
            stages.append([replace(first, fixed_bytes=fixed_bytes), *others])
        return stages

    def cells_problem(self, ranges: Sequence[range]) -> CellsProblem:
        """Returns the problem of scheduling these cells."""
        machine, pipeline = self.machine, self.pipeline
        memory = self.stage_bytes(ranges), machine.memory_limit_bytes, machine.transport, pipeline.remat != "never"
        return CellsProblem(self.placement, pipeline.micro_batches, self.cell_costs(ranges), machine.link, *memory)

    def cell_costs(self, ranges: Sequence[range]) -> list[CellCost]:
        """Returns the cost of each cell."""
        reduce_s = self.machine.reduce_s_per_byte(self.pipeline.replicas)
        return cell_costs(self.problem.costs, ranges, self.placement, self.machine.link, reduce_s)

    def pairs(self, ranges: Sequence[range]) -> list[CellPair]:
        """Returns the pairs of cells that exchange messages."""
        return communicating_pairs(self._skips, ranges, self.placement)

    def p2p_bytes(self, pairs: Sequence[CellPair]) -> list[int]:
        """Returns the bytes of each stage's point-to-point communicators."""
        return [count * self.machine.p2p_bytes for count in p2p_communicators(pairs, self.placement)]

    def peaks(self, schedule: Schedule, ranges: Sequence[range]) -> list[int]:
        """Returns the peak of each stage."""
        stages = zip(schedule, self.stage_bytes(ranges), strict=True)
        return [peak_bytes(actions, cells, self.flow) for actions, cells in stages]

    def max_live_graphs(self, ranges: Sequence[range]) -> tuple[int, ...]:
        """Returns for each cell the most graphs that fit its stage's memory; at least one."""
        schedule = self.schedule_config.base_schedule(self.pipeline.stages, self.pipeline.micro_batches)
        most_graphs = cache(self._max_live_graphs)  # most stages are equal
        stages = zip(map(tuple, schedule), map(tuple, self.stage_bytes(ranges)), strict=True)
        graphs = [most_graphs(actions, cells) for actions, cells in stages]
        return tuple(graphs[self.placement.stage_of(cell)] for cell in range(self._count))

    def _max_live_graphs(self, actions: Sequence[Action], cells: Sequence[CellBytes]) -> int:
        """Returns the number for one stage, by bisection."""

        def fits(count: int) -> bool:
            walk = with_recomputes(actions, [count] * len(cells))
            return peak_bytes(walk, cells, self.flow) <= self.machine.memory_limit_bytes

        if fits(UNLIMITED):
            return UNLIMITED
        least, beyond = 1, max(2, self.pipeline.micro_batches)
        while beyond - least > 1:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if fits(middle) else (least, middle)
        return least

    def _ranges_of(self, layers_per_cell: Sequence[int]) -> list[range]:
        wrong = []
        if len(layers_per_cell) != self._count:
            virtual_stages = self.pipeline.virtual_stages
            per_stage = f" of {virtual_stages} cells each" if virtual_stages > 1 else ""
            wrong.append(
                f"pipeline.layers_per_cell names {len(layers_per_cell)} cells, "
                f"pipeline.stages is {self.pipeline.stages}{per_stage}"
            )
        try:
            ranges = cell_ranges(layers_per_cell, len(self.problem.costs))
        except SettingError as error:
            wrong.append(str(error))
        if wrong:
            raise PlanError(wrong)
        return ranges

    def partition_with_even_stages(self) -> tuple[int, ...]:
        """Returns the most even cut after layers have moved to where they make stages more even."""
        cell_to_stage = [self.placement.stage_of(cell) for cell in range(self._count)]
        return tuple(with_even_stages(self.most_even_partition(), self._seconds, cell_to_stage))

    def most_even_partition(self, furthest_end: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the layers of each cell whose heaviest cell is the lightest there is, of those that fit if
        ``furthest_end`` says which do. Raises PlacementError if none do."""
        return tuple(partition(self._seconds, self._count, furthest_end))

    def _most_even_that_fit(self, limit_bytes: int, most_even: Sequence[range]) -> list[range]:
        """Returns the most even cells of which each fits; ``most_even`` do not."""
        furthest_end = self._bound.furthest_end(self._cell_limit_bytes(limit_bytes) - self._process_bytes)
        try:
            return cell_ranges(self.most_even_partition(furthest_end), len(self.problem.costs))
        except PlacementError:
            raise PlanError([self._too_large_fault(limit_bytes, furthest_end, most_even)]) from None

    @cached_property
    def _bound(self) -> CellBound:
        """The bound of a cell's bytes in any of the stages."""
        stages, cells = {*map(tuple, self._schedule)}, range(self.pipeline.virtual_stages)
        terms = [peak_terms(actions, at, self.flow) for actions in stages for at in cells]
        return CellBound(self._memory, largest_rows(np.concatenate(terms)), self.flow, self._count)

    def _cell_limit_bytes(self, limit_bytes: int) -> int:
        """Returns the bytes for one cell: the cells of a stage share its device with one process and its communicators.
        Which cells skips connect is not known before the cells are."""
        neighbours = [range(at, at + 1) for at in range(self._count)]
        p2p_bytes = max(self.p2p_bytes(communicating_pairs([], neighbours, self.placement)))
        own = self._process_bytes
        return own + (limit_bytes - p2p_bytes - own) // self.pipeline.virtual_stages

    @property
    def _process_bytes(self) -> int:
        return self.machine.process_bytes + UNCOUNTED_BYTES

    def _too_large_fault(self, limit_bytes: int, furthest_end: Sequence[int], most_even: Sequence[range]) -> str:
        """Returns why no cut fits: a layer too large alone; too few stages, and the worst cell of the most even cut; or
        too many, because a layer fits only behind others."""
        virtual_stages, limit_gib = self.pipeline.virtual_stages, self._cell_limit_bytes(limit_bytes) / GIB
        room = f"the device has {self._in_gib(limit_bytes)}"
        if virtual_stages > 1:
            room += f", {limit_gib:.2f} GiB for each of {virtual_stages} cells"

        def need(begin: int, end: int) -> float:
            peak = self._bound.peak(np.array([begin]), np.array([end]))
            return int(self._process_bytes + peak[0]) / GIB

        fewest = fewest_cells(furthest_end)
        if fewest is None:
            alone = {at: need(at, at + 1) for at, end in enumerate(furthest_end) if end == at}
            worst = max(alone, key=alone.__getitem__)
            others = f", and {len(alone) - 1} other layers do not fit either" if len(alone) > 1 else ""
            return f"layer {worst} alone needs {alone[worst]:.2f} GiB, {room}{others}"
        if fewest <= self._count:
            first = next(at for at, end in enumerate(furthest_end) if end == at)
            none_fits = f"no cut of {len(furthest_end)} layers into {self._count} cells fits"
            why = f"layer {first} does not fit as the first of a cell, whose inputs are saved too"
            return f"{none_fits}, because {why}; use fewer stages, down to {-(-fewest // virtual_stages)}"
        over = {k: gib for k, cell in enumerate(most_even) if (gib := need(cell[0], cell[-1] + 1)) > limit_gib}
        worst = max(over, key=over.__getitem__)
        others = f", and {len(over) - 1} other stages too much as well" if len(over) > 1 else ""
        part = "stage" if virtual_stages == 1 else "cell"
        message = f"{part} {worst} (layers {_layers([most_even[worst]])}) needs {over[worst]:.2f} GiB, {room}{others}"
        if self.machine.cores is not None:  # with more stages each would get less memory
            return f"{message}; all stages share the memory of one machine"
        enough = -(-fewest // virtual_stages)
        return f"{message}; {enough} stages are the fewest that fit, {self.pipeline.stages} were requested"

    def _in_gib(self, limit_bytes: int) -> str:
        """Returns a device's memory and its usable part as text."""
        reserve = self.machine.reserve
        if not reserve:
            return f"{limit_bytes / GIB:.2f} GiB"
        total = limit_bytes + reserve
        return f"{total / GIB:.2f} GiB ({limit_bytes / GIB:.2f} GiB after a reserve of {reserve / total:.0%})"


def _layers(cells: Sequence[range]) -> str:
    return " and ".join(f"{cell[0]}-{cell[-1]}" for cell in cells)
