"""A schedule in the making: action after action, with the times of ``simulate`` and the bytes of ``stage_memory``.

    stage 0   F0 F1 F2 .  .  I0 |      what may come next follows from how many micro-batches have passed each cell,
    stage 1   .  F0 F1 .  I0 |         when it may start from the messages, and whether it fits from what is held

Each cell takes its micro-batches in order. A forward that keeps no graph is the kind ``f`` here; an ``R`` precedes the
backward of its micro-batch. A message takes its own time only: links are never full, and receives are posted in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import CellPair, TransportName
from suite.pipeline.planning.simulate import CellCost, Link, Links
from suite.pipeline.planning.stage_memory import CellMemory
from suite.pipeline.schedule.action import Action, Schedule
from suite.pipeline.schedule.flow_control import FlowControl, flow_control
from suite.pipeline.schedule.validate import validate

EXACT = 1 - 1e-9
"""Times closer than this factor count as equal: they may be rounded sums of the same seconds."""


class SchedulingProblem:
    """The problem of a search and of a lower bound: what is given, and what follows from it; lists by cell or by
    stage."""

    def __init__(
        self,
        placement: CellPlacement,
        micro_batches: int,
        costs: Sequence[CellCost],
        links: Link | Links,
        memory: Sequence[Sequence[CellMemory]],
        limit_bytes: int,
        transport: TransportName = "gloo",
        may_recompute: bool = True,
        waiting: Mapping[CellPair, tuple[int, int]] | None = None,
    ) -> None:
        """``costs`` has the cells in the order of the model, ``memory`` those of each stage. A stage may need at most
        ``limit_bytes`` (``stage_memory.peak_bytes``). Without ``may_recompute`` all graphs are kept. ``waiting`` are
        the most activations, and gradients, for which ``memory`` has room between two cells of one stage."""
        self.placement, self.micro_batches, self.costs, self.links = placement, micro_batches, costs, links
        self.stage_memory, self.limit_bytes = memory, limit_bytes
        self.transport, self.may_recompute = transport, may_recompute
        self.flow = flow = flow_control(transport, placement.stages, len(costs) // placement.stages)
        self.cell_to_stage = [placement.stage_of(cell) for cell in range(len(costs))]
        self.own = [tuple(placement.on_stage(k, range(len(costs)))) for k in range(placement.stages)]
        self.memory = [memory[k][self.own[k].index(cell)] for cell, k in enumerate(self.cell_to_stage)]
        self.bytes_left = [limit_bytes - sum(cell.fixed_bytes for cell in cells) for cells in memory]
        self.holds_all = [
            sum(_most_bytes(cell, micro_batches, flow) for cell in cells) <= left
            for cells, left in zip(memory, self.bytes_left, strict=True)
        ]
        """Whether a stage has room for all micro-batches at once."""
        self.seconds = {kind: [cost.seconds(kind.upper(), kind == "f") for cost in costs] for kind in "FfRIBW"}
        kinds = "FfRBIW" if may_recompute else "FBIW"
        self.moves = [
            [(kind, at) for at in own for kind in kinds if costs[at].weight_grad_s or kind not in "IW"]
            for own in self.own
        ]
        """Kinds and cells of the actions of each stage."""
        self.least_s = [cost.least_seconds for cost in costs]
        self.sources: dict[int, list[list[tuple[int, float, float]]]] = {
            1: [[] for _ in costs],
            -1: [[] for _ in costs],
        }
        """By direction, where a cell's messages come from, their seconds, and those after the stage is free in which
        they cannot leave."""
        self.followers: dict[int, list[list[tuple[int, int]]]] = {1: [[] for _ in costs], -1: [[] for _ in costs]}
        """By direction, the cells of its own stage to which a cell passes tensors, and how many may wait there."""
        self.receivers: dict[int, list[set[int]]] = {1: [set() for _ in costs], -1: [set() for _ in costs]}
        for source, cost in enumerate(costs[:-1]):
            for to, *sizes in (
                (source + 1, cost.activation_bytes, costs[source + 1].gradient_bytes),
                *((far.to, far.activation_bytes, far.gradient_bytes) for far in cost.far_messages),
            ):
                self._add(source, to, sizes, (waiting or {}).get((source, to), (micro_batches,) * 2))

    def _add(self, source: int, target: int, sizes: Sequence[int], waiting: Sequence[int]) -> None:
        link, crosses = self._link(source, target), self.placement.crosses(source, target)
        for direction, begin, end, size, most in zip(
            (1, -1), (source, target), (target, source), sizes, waiting, strict=True
        ):
            if not crosses:
                self.followers[direction][begin].append((end, max(most, self.flow.recvs_ahead(direction))))
            waits_for_receive = crosses and not self.flow.recvs_ahead(direction)
            delay_s = link.latency_s if waits_for_receive else -float("inf")
            self.receivers[direction][begin].add(self.cell_to_stage[end])
            self.sources[direction][end].append((begin, self.message_s(begin, end, size), delay_s))

    def message_s(self, source: int, target: int, size: int) -> float:
        """Returns the seconds of a message from one cell to another; 0 if both are on one stage."""
        return self._link(source, target).seconds(size) if self.placement.crosses(source, target) else 0.0

    def _link(self, source: int, target: int) -> Link:
        return self.links.between(self.cell_to_stage[source], self.cell_to_stage[target])


def _most_bytes(cell: CellMemory, micro_batches: int, flow: FlowControl) -> int:
    """Returns more than a cell ever needs, fixed bytes aside."""
    held = micro_batches * (cell.input_bytes + cell.activation_bytes + cell.deferred_bytes)
    received = flow.recvs_ahead(1) * cell.input_bytes + (1 + flow.recvs_ahead(-1)) * cell.received_gradient_bytes
    sent = flow.max_inflight_sends * max(cell.sent_activation_bytes, cell.sent_gradient_bytes)
    peak = max(cell.forward_peak_bytes, cell.graph_peak_bytes, cell.backward_peak_bytes + cell.deferred_bytes)
    return held + received + sent + peak + cell.made_gradient_bytes + cell.far_message_bytes


class _Cell:
    """How many micro-batches have passed a cell, and what it holds."""

    def __init__(self, memory: CellMemory, flow: FlowControl, micro_batches: int) -> None:
        self._memory, self._flow, self._micro_batches = memory, flow, micro_batches
        self.ends: dict[int, tuple[float, ...]] = {1: (), -1: ()}
        """When each forward, 1, and backward, -1, has ended."""
        self.forwards = self.backwards = self.graphs = 0
        self.dropped: tuple[int, ...] = ()
        """Micro-batches to recompute."""
        self.deferred: tuple[int, ...] = ()
        self._in_flight: tuple[int, ...] = ()
        activations, gradients = (min(flow.recvs_ahead(direction), micro_batches) for direction in (1, -1))
        received = activations * memory.input_bytes + gradients * memory.received_gradient_bytes
        self.bytes = received + memory.far_message_bytes - memory.gradient_bytes

    def state(self) -> tuple[object, ...]:
        """Returns all but times that matters for what may come next."""
        return self.forwards, self.backwards, self.graphs, self.dropped, len(self.deferred), self._in_flight

    def is_done(self) -> bool:
        return self.backwards == self._micro_batches and not self.deferred

    def needs_recompute(self) -> bool:
        """Whether the next backward does."""
        return bool(self.dropped) and self.dropped[0] == self.backwards

    def bytes_with(self, kind: str) -> tuple[int, int]:
        """Returns the bytes while the next action of a kind runs, and once it is done (``stage_memory``)."""
        memory = self._memory
        if kind == "R":
            return self.bytes + memory.graph_peak_bytes, self.bytes + memory.activation_bytes
        if kind == "W":
            return self.bytes + memory.backward_peak_bytes, self.bytes - memory.deferred_bytes - memory.input_bytes
        if kind in "Ff":
            kept, peak = memory.activation_bytes, memory.graph_peak_bytes
            if kind == "f":
                kept, peak = 0, memory.forward_peak_bytes
            held = self.bytes + memory.input_bytes * (1 - self._uses_last_receive(1))
            return held + peak, held + kept + self._more_in_flight(memory.sent_activation_bytes)
        held = self.bytes - memory.received_gradient_bytes * self._uses_last_receive(-1)
        peak = memory.backward_peak_bytes + memory.received_gradient_bytes
        freed = memory.activation_bytes + memory.input_bytes
        if kind == "I":
            peak += max(0, memory.deferred_bytes - memory.activation_bytes)
            freed = memory.activation_bytes - memory.deferred_bytes
        sent = self._more_in_flight(memory.sent_gradient_bytes)
        if self.backwards:
            return held + peak, held - freed + sent
        return held + peak + memory.made_gradient_bytes, held - freed + sent + memory.gradient_bytes

    def _uses_last_receive(self, direction: int) -> bool:
        """Whether no receive is posted for the one that the next action uses."""
        return self._micro_batches - len(self.ends[direction]) <= self._flow.recvs_ahead(direction)

    def _more_in_flight(self, size: int) -> int:
        """Returns what a message of this size adds to those in flight; the oldest leaves."""
        is_full = size and len(self._in_flight) == self._flow.max_inflight_sends
        return size - self._in_flight[0] if is_full else size

    def after(self, kind: str, end: float) -> _Cell:
        """Returns the cell when its next action of a kind has ended."""
        cell = object.__new__(_Cell)
        cell.__dict__.update(self.__dict__)  # faster than ``copy``, and a plan copies millions
        cell.bytes = self.bytes_with(kind)[1]
        cell.graphs += (kind in "FR") - (kind in "IB")
        if kind == "R":
            cell.dropped = self.dropped[1:]
        elif kind == "W":
            cell.deferred = self.deferred[1:]
        else:
            direction = 1 if kind in "Ff" else -1
            cell.ends = {**self.ends, direction: (*self.ends[direction], end)}
            memory = self._memory
            sent = memory.sent_activation_bytes if direction > 0 else memory.sent_gradient_bytes
            if sent:
                cell._in_flight = (*self._in_flight, sent)[-self._flow.max_inflight_sends :]
            if kind == "f":
                cell.dropped = (*self.dropped, self.forwards)
            elif kind == "I":
                cell.deferred = (*self.deferred, self.backwards)
            cell.forwards, cell.backwards = len(cell.ends[1]), len(cell.ends[-1])
        return cell


class PartialSchedule:
    """The actions so far. ``free`` is when each stage has done its own."""

    def __init__(self, problem: SchedulingProblem) -> None:
        self.problem = problem
        self.free = [0.0] * problem.placement.stages
        self.cells = [_Cell(memory, problem.flow, problem.micro_batches) for memory in problem.memory]
        self._trail: tuple[Any, ...] = ()  # the last action, behind all before it

    def copy(self) -> PartialSchedule:
        """Returns a copy that grows apart from this one."""
        other = copy(self)
        other.free, other.cells = list(self.free), list(self.cells)
        return other

    def is_next(self, kind: str, at: int) -> bool:
        """Whether a cell has an action of a kind to run next, once its messages are there."""
        cell = self.cells[at]
        if kind in "Ff":
            return cell.forwards < self.problem.micro_batches
        if kind == "W":
            return bool(cell.deferred)
        return cell.backwards < cell.forwards and cell.needs_recompute() == (kind == "R")

    def earliest_start(self, kind: str, at: int) -> float | None:
        """Returns when a cell's next action of a kind can start, None if what it needs has not been scheduled."""
        cell, start = self.cells[at], self.free[self.problem.cell_to_stage[at]]
        if not self.is_next(kind, at):
            return None
        if kind in "RW":
            return start
        direction, i = (1, cell.forwards) if kind in "Ff" else (-1, cell.backwards)
        for follower, most in self.problem.followers[direction][at]:
            if i - len(self.cells[follower].ends[direction]) >= most:
                return None
        free = start
        for source, seconds, delay_s in self.problem.sources[direction][at]:
            ends = self.cells[source].ends[direction]
            if i >= len(ends):
                return None
            start = max(start, max(ends[i], free + delay_s) + seconds)
        return start

    def fits(self, kind: str, at: int, leaves_room: bool = False) -> bool:
        """Whether a cell's next action of a kind fits its stage's memory, and what it leaves behind; with
        ``leaves_room`` also the next backward of each cell of the stage, and a micro-batch in the later cells that have
        none: otherwise all may wait for memory that nothing frees."""
        k = self.problem.cell_to_stage[at]
        if self.problem.holds_all[k]:
            return True
        left = self.problem.bytes_left[k] - sum(self.cells[own].bytes for own in self.problem.own[k] if own != at)
        during, after = self.cells[at].bytes_with(kind)
        return max(during, after + (self._needed_room(kind, at) if leaves_room else 0)) <= left

    def _needed_room(self, kind: str, at: int) -> int:
        needed = most = 0
        for own in self.problem.own[self.problem.cell_to_stage[at]]:
            cell, memory = self.cells[own], self.problem.memory[own]
            is_empty = cell.forwards == cell.backwards
            if is_empty and own < at:
                continue
            lacks_graph = own > at or kind == "f" if is_empty else cell.needs_recompute()
            graph_bytes = memory.activation_bytes if lacks_graph and (own, kind) != (at, "R") else 0
            gradients = memory.received_gradient_bytes + (0 if cell.backwards else memory.made_gradient_bytes)
            recompute = memory.graph_peak_bytes - memory.activation_bytes
            most = max(most, graph_bytes + max(recompute, memory.backward_peak_bytes + gradients))
            if is_empty and own > at:
                needed += memory.input_bytes + memory.sent_activation_bytes
                most = max(most, memory.forward_peak_bytes)
        return needed + most

    def run(self, kind: str, at: int, start: float) -> float:
        """Appends a cell's next action of a kind to its stage's; returns when it ends."""
        cell, end = self.cells[at], start + self.problem.seconds[kind][at]
        next_of = {"R": cell.dropped[:1], "W": cell.deferred[:1], "I": (cell.backwards,), "B": (cell.backwards,)}
        (i,) = next_of.get(kind, (cell.forwards,))
        self.cells[at] = cell.after(kind, end)
        self.free[self.problem.cell_to_stage[at]] = end
        self._trail = self._trail, kind, at, i
        return end

    def schedule(self) -> Schedule:
        schedule: Schedule = [[] for _ in self.free]
        trail = self._trail
        while trail:
            trail, kind, at, i = trail
            virtual_stage = self.problem.placement.virtual_stage_of(at)
            schedule[self.problem.cell_to_stage[at]].append(Action(kind.upper(), i, virtual_stage))
        return [actions[::-1] for actions in schedule]

    def can_run(self) -> bool:
        """Whether no message of a complete schedule waits forever for others."""
        problem = self.problem
        pairs = [(source, target) for target, sources in enumerate(problem.sources[1]) for source, *_ in sources]
        cell_to_stage = problem.placement.cell_to_stage
        try:
            validate(self.schedule(), problem.micro_batches, True, problem.transport, pairs, cell_to_stage)
        except SettingError:
            return False
        return True

    def is_complete(self) -> bool:
        return all(cell.is_done() for cell in self.cells)

    def state(self) -> tuple[object, ...]:
        """Returns all but times that matters for what may come next."""
        return tuple(cell.state() for cell in self.cells)

    def progress(self) -> int:
        """Returns a number that any action raises, and that equal states share."""
        return sum(3 * (cell.forwards + cell.backwards) - len(cell.dropped) - len(cell.deferred) for cell in self.cells)

    def times(self, clock: float) -> list[float]:
        """Returns all times that matter for what may come next, if nothing starts before the clock."""
        times = [max(free, clock) for free in self.free]
        for direction, sources in self.problem.sources.items():
            for at, cell in enumerate(self.cells):
                for source, *_ in sources[at]:
                    times += self.cells[source].ends[direction][len(cell.ends[direction]) :]
        return times

    def least_end(self, clock: float) -> float:
        """Returns a time before which the step cannot end, if nothing else starts before the clock: each stage runs
        what is left to it, and the last micro-batch passes what is left of the pipeline."""
        problem, count = self.problem, self.problem.micro_batches
        begins = [max(free, clock) for free in self.free]
        ends, bound, rest = list(begins), 0.0, problem.least_s[0][3]
        for at, cell in enumerate(self.cells):
            k, (forward, graph, backward, weight_grad) = problem.cell_to_stage[at], problem.least_s[at]
            ends[k] += (count - cell.forwards) * (forward + graph) + len(cell.dropped) * problem.seconds["R"][at]
            ends[k] += (count - cell.backwards) * (backward + weight_grad)
            ends[k] += len(cell.deferred) * problem.seconds["W"][at]
            if cell.backwards < count:
                bound = max(bound, begins[k] + (count - cell.backwards) * backward + rest)
            rest += backward
        for at, cell in reversed(list(enumerate(self.cells))):
            forward = problem.least_s[at][0]
            if cell.forwards < count:
                bound = max(bound, begins[problem.cell_to_stage[at]] + (count - cell.forwards) * forward + rest)
            rest += forward
        return max(bound, *ends)
