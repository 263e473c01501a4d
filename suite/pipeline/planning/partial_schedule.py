"""A schedule in the making: action after action, with the times of ``simulate`` and the bytes of ``stage_memory``.

    stage 0   F0 F1 F2 .  .  I0 |      what may come next follows from how many micro-batches have passed each cell,
    stage 1   .  F0 F1 .  I0 |         when it may start from the messages, and whether it fits from what is held

Each cell takes its micro-batches in order. A forward that keeps no graph is the kind ``f`` here; an ``R`` precedes the
backward of its micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.simulate import CellCost, Link, Links
from suite.pipeline.planning.stage_memory import CellMemory
from suite.pipeline.schedule.action import Action, Schedule
from suite.pipeline.schedule.flow_control import FlowControl

KINDS = "FfRIBW"


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a cell's message comes from; ``number`` counts the messages of a micro-batch."""

    number: int
    cell: int
    transfer_s: float
    latency_s: float
    recvs_ahead: int


class SchedulingProblem:
    """What is given: ``links`` and ``flow`` as in ``simulate``, the memory of each stage's cells, and the most bytes of
    a stage."""

    def __init__(
        self,
        placement: CellPlacement,
        micro_batches: int,
        costs: Sequence[CellCost],
        links: Link | Links,
        flow: FlowControl,
        memory: Sequence[Sequence[CellMemory]],
        limit_bytes: int,
    ) -> None:
        self.placement, self.micro_batches, self.costs, self.flow = placement, micro_batches, costs, flow
        self.owner = [placement.stage_of(cell) for cell in range(len(costs))]
        self.own = [tuple(placement.on_stage(k, range(len(costs)))) for k in range(placement.stages)]
        self.memory = [memory[k][self.own[k].index(cell)] for cell, k in enumerate(self.owner)]
        self.bytes_left = [limit_bytes - sum(cell.fixed_bytes for cell in cells) for cells in memory]
        self.seconds = {kind: [cost.seconds(kind.upper(), kind == "f") for cost in costs] for kind in KINDS}
        self.least_s = [
            (min(kept, dropped), kept - min(kept, dropped), min(whole, split), whole - min(whole, split))
            for kept, dropped, whole, split in zip(*(self.seconds[kind] for kind in "FfBI"), strict=True)
        ]
        """Of each cell: a forward, what its graph adds, a backward, its weight gradients."""
        self.holds_all = [
            sum(_most_bytes(cell, micro_batches, flow) for cell in cells) <= left
            for cells, left in zip(memory, self.bytes_left, strict=True)
        ]
        """Whether a stage has room for all micro-batches at once."""
        self.sources: dict[int, list[list[_Source]]] = {1: [[] for _ in costs], -1: [[] for _ in costs]}
        self.messages = 0
        for source, cost in enumerate(costs):
            if source + 1 < len(costs):
                self._add(source, source + 1, cost.activation_bytes, costs[source + 1].gradient_bytes, links)
            for far in cost.far_messages:
                self._add(source, far.to, far.activation_bytes, far.gradient_bytes, links)
        self.receivers: dict[int, list[set[int]]] = {1: [set() for _ in costs], -1: [set() for _ in costs]}
        for direction, of_cells in self.sources.items():
            for cell, cell_sources in enumerate(of_cells):
                for each in cell_sources:
                    self.receivers[direction][each.cell].add(self.owner[cell])

    def _add(self, source: int, target: int, activation_bytes: int, gradient_bytes: int, links: Link | Links) -> None:
        link = links.between(self.owner[source], self.owner[target]) if isinstance(links, Links) else links
        for direction, begin, end, size in (1, source, target, activation_bytes), (-1, target, source, gradient_bytes):
            route = size / link.bytes_per_s, link.latency_s, self.flow.recvs_ahead(direction)
            if not self.placement.crosses(source, target):
                route = 0.0, 0.0, self.micro_batches
            self.sources[direction][end].append(_Source(self.messages, begin, *route))
            self.messages += 1


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
        self.starts: dict[int, list[float]] = {1: [], -1: []}
        self.ends: dict[int, list[float]] = {1: [], -1: []}
        self.forwards = self.backwards = self.graphs = 0
        self.dropped: deque[int] = deque()
        """Micro-batches to recompute."""
        self.deferred: deque[int] = deque()
        self._sent = [0]
        ahead = (min(flow.recvs_ahead(direction), micro_batches) for direction in (1, -1))
        received = sum(map(int.__mul__, ahead, (memory.input_bytes, memory.received_gradient_bytes)))
        self.bytes = received + memory.far_message_bytes - memory.gradient_bytes

    def copy(self) -> _Cell:
        """Returns a copy that changes apart from this one."""
        other = copy(self)
        other.starts = {direction: list(times) for direction, times in self.starts.items()}
        other.ends = {direction: list(times) for direction, times in self.ends.items()}
        other.dropped, other.deferred, other._sent = copy(self.dropped), copy(self.deferred), list(self._sent)
        return other

    def state(self) -> tuple[object, ...]:
        """Returns all but times that matters for what may come next."""
        in_flight = tuple(sent - self._sent[-1] for sent in self._sent[-1 - self._flow.max_inflight_sends :])
        return self.forwards, self.backwards, self.graphs, tuple(self.dropped), len(self.deferred), in_flight

    def has_graph(self) -> bool:
        """Whether the graph of the next backward exists."""
        return self.backwards < self.forwards and not (self.dropped and self.dropped[0] == self.backwards)

    def bytes_during(self, kind: str) -> int:
        """Returns the bytes while the next action of a kind runs (``stage_memory``)."""
        memory = self._memory
        if kind in "Ff":
            peak = memory.graph_peak_bytes if kind == "F" else memory.forward_peak_bytes
            return self.bytes + memory.input_bytes * (1 - self._uses_last_receive(1)) + peak
        if kind == "R":
            return self.bytes + memory.graph_peak_bytes
        if kind == "W":
            return self.bytes + memory.backward_peak_bytes
        peak = memory.backward_peak_bytes + memory.received_gradient_bytes * (1 - self._uses_last_receive(-1))
        peak += max(0, memory.deferred_bytes - memory.activation_bytes) if kind == "I" else 0
        return self.bytes + peak + (0 if self.backwards else memory.made_gradient_bytes)

    def bytes_after(self, kind: str) -> int:
        """Returns the bytes once the next action of a kind is done."""
        memory = self._memory
        if kind == "R":
            return self.bytes + memory.activation_bytes
        if kind == "W":
            return self.bytes - memory.deferred_bytes - memory.input_bytes
        if kind in "Ff":
            kept = memory.activation_bytes if kind == "F" else 0
            held = kept + memory.input_bytes * (1 - self._uses_last_receive(1))
            return self.bytes + held + self._more_in_flight(memory.sent_activation_bytes)
        freed = memory.activation_bytes + memory.received_gradient_bytes * self._uses_last_receive(-1)
        freed += memory.input_bytes if kind == "B" else -memory.deferred_bytes
        made = 0 if self.backwards else memory.gradient_bytes
        return self.bytes - freed + made + self._more_in_flight(memory.sent_gradient_bytes)

    def _uses_last_receive(self, direction: int) -> bool:
        """Whether no receive is posted for the one that the next action uses."""
        done = self.forwards if direction > 0 else self.backwards
        return self._micro_batches - done <= self._flow.recvs_ahead(direction)

    def _more_in_flight(self, size: int) -> int:
        """Returns what a message of this size adds to those in flight; the oldest leaves."""
        sends = self._flow.max_inflight_sends
        return size - (self._sent[-sends] - self._sent[-sends - 1] if size and len(self._sent) > sends else 0)

    def run(self, kind: str, start: float, end: float) -> int:
        """Runs its next action of a kind; returns the micro-batch."""
        self.bytes = self.bytes_after(kind)
        self.graphs += (kind in "FR") - (kind in "IB")
        if kind == "R":
            return self.dropped.popleft()
        if kind == "W":
            return self.deferred.popleft()
        direction = 1 if kind in "Ff" else -1
        i = len(self.starts[direction])
        self.starts[direction].append(start)
        self.ends[direction].append(end)
        if direction > 0:
            self.forwards += 1
        else:
            self.backwards += 1
        size = self._memory.sent_activation_bytes if direction > 0 else self._memory.sent_gradient_bytes
        if size:
            self._sent.append(self._sent[-1] + size)
        if kind == "f":
            self.dropped.append(i)
        elif kind == "I":
            self.deferred.append(i)
        return i


class PartialSchedule:
    """The actions so far. ``free`` is when each stage has done its own."""

    def __init__(self, problem: SchedulingProblem) -> None:
        self.problem = problem
        self.free = [0.0] * problem.placement.stages
        self.cells = [_Cell(memory, problem.flow, problem.micro_batches) for memory in problem.memory]
        self._left = [0.0] * problem.messages  # when the last used message of each source had left its link
        self._trail: tuple[Any, ...] = ()  # the last action, behind all before it

    def followed_by(self, kind: str, at: int, start: float) -> PartialSchedule:
        """Returns another one with one action more (``run``); this one stays as it is."""
        other = copy(self)
        other.free, other._left, other.cells = list(self.free), list(self._left), list(self.cells)
        other.cells[at] = self.cells[at].copy()
        other.run(kind, at, start)
        return other

    def earliest_start(self, kind: str, at: int) -> float | None:
        """Returns when a cell's next action of a kind can start, None if what it needs has not been scheduled."""
        cell = self.cells[at]
        if kind in "Ff":
            return self._arrival(1, at, cell.forwards) if cell.forwards < self.problem.micro_batches else None
        if kind in "IB":
            return self._arrival(-1, at, cell.backwards) if cell.has_graph() else None
        waits = cell.deferred if kind == "W" else cell.dropped and cell.dropped[0] == cell.backwards
        return self.free[self.problem.owner[at]] if waits else None

    def _arrival(self, direction: int, at: int, i: int) -> float | None:
        """Returns when a cell's stage is free and has all messages of micro-batch i (``playback``)."""
        start = free = self.free[self.problem.owner[at]]
        for source in self.problem.sources[direction][at]:
            ends = self.cells[source.cell].ends[direction]
            if i >= len(ends):
                return None
            start = max(start, self._leaves(source, direction, at, i, free) + source.latency_s)
        return start

    def _leaves(self, source: _Source, direction: int, at: int, i: int, free: float) -> float:
        """Returns when a message has left its link."""
        ended = self.cells[source.cell].ends[direction][i]
        if not source.transfer_s and not source.latency_s:
            return ended
        posted, ahead = 0.0, source.recvs_ahead
        if i >= ahead:
            posted = (self.cells[at].starts[direction][i - ahead] if ahead else free) + source.latency_s
        return max(self._left[source.number], ended, posted) + source.transfer_s

    def fits(self, kind: str, at: int) -> bool:
        """Whether a cell's next action of a kind fits its stage's memory, and what it leaves behind."""
        cell, left = self.cells[at], self._bytes_left(at)
        return cell.bytes_during(kind) <= left and cell.bytes_after(kind) <= left

    def _bytes_left(self, at: int) -> int:
        """Returns what the other cells of its stage leave to a cell."""
        k = self.problem.owner[at]
        return self.problem.bytes_left[k] - sum(self.cells[own].bytes for own in self.problem.own[k] if own != at)

    def leaves_room(self, kind: str, at: int) -> bool:
        """Whether a forward or a recompute leaves room to go on: for the next backward of each cell of its stage, and
        for a micro-batch in the later cells that have none. Otherwise all may wait for memory that nothing frees."""
        needed = most = 0
        for own in self.problem.own[self.problem.owner[at]]:
            cell, memory = self.cells[own], self.problem.memory[own]
            is_empty = cell.forwards == cell.backwards
            if is_empty and own < at:
                continue
            next_needs_graph = cell.dropped and cell.dropped[0] == cell.backwards and (own, kind) != (at, "R")
            if is_empty and (own > at or kind == "f"):
                next_needs_graph = True
            backward = memory.backward_peak_bytes + memory.received_gradient_bytes
            backward += 0 if cell.backwards else memory.made_gradient_bytes
            graph = memory.graph_peak_bytes if next_needs_graph else memory.graph_peak_bytes - memory.activation_bytes
            backward += memory.activation_bytes if next_needs_graph else 0
            most = max(most, backward, graph if next_needs_graph or cell.dropped or kind == "f" else 0)
            if is_empty and own > at:
                needed += memory.input_bytes + memory.sent_activation_bytes
                most = max(most, memory.forward_peak_bytes)
        return self.cells[at].bytes_after(kind) + needed + most <= self._bytes_left(at)

    def run(self, kind: str, at: int, start: float) -> float:
        """Appends a cell's next action of a kind to its stage's; returns when it ends."""
        k, cell = self.problem.owner[at], self.cells[at]
        direction = 1 if kind in "Ff" else -1 if kind in "IB" else 0
        if direction:
            i = cell.forwards if direction > 0 else cell.backwards
            for source in self.problem.sources[direction][at]:
                self._left[source.number] = self._leaves(source, direction, at, i, self.free[k])
        self.free[k] = end = start + self.problem.seconds[kind][at]
        self._trail = self._trail, kind, at, cell.run(kind, start, end)
        return end

    def schedule(self) -> Schedule:
        """Returns the actions of each stage."""
        schedule: Schedule = [[] for _ in self.free]
        trail = self._trail
        while trail:
            trail, kind, at, i = trail
            virtual_stage = self.problem.placement.virtual_stage_of(at)
            schedule[self.problem.owner[at]].append(Action(kind.upper(), i, virtual_stage))
        return [actions[::-1] for actions in schedule]

    def times(self, clock: float) -> list[float]:
        """Returns all times that matter for what may come next, if nothing starts before the clock."""
        times = [max(free, clock) for free in self.free] + self._left
        for direction, sources in self.problem.sources.items():
            for at, cell in enumerate(self.cells):
                done = len(cell.starts[direction])
                for source in sources[at]:
                    times += self.cells[source.cell].ends[direction][done:]
                    if source.latency_s or source.transfer_s:
                        times += cell.starts[direction][max(0, done - source.recvs_ahead) :]
        return times

    def least_end(self, clock: float) -> float:
        """Returns a time before which a step cannot end that begins so, if nothing else starts before the clock: each
        stage runs what is left to it, and the last micro-batch passes what is left of the pipeline."""
        problem, count = self.problem, self.problem.micro_batches
        ends = [max(free, clock) for free in self.free]
        begins, back, bound = list(ends), 0.0, 0.0
        for at, cell in enumerate(self.cells):
            k, (forward, graph, backward, weight_grad) = problem.owner[at], problem.least_s[at]
            ends[k] += (count - cell.forwards) * (forward + graph) + len(cell.dropped) * problem.seconds["R"][at]
            ends[k] += (count - cell.backwards) * (backward + weight_grad) + len(cell.deferred) * problem.seconds["W"][
                at
            ]
            if cell.backwards < count:
                bound = max(bound, begins[k] + (count - cell.backwards) * backward + back + problem.least_s[0][3])
            back += backward
        for at, cell in reversed(list(enumerate(self.cells))):
            forward, graph, *_ = problem.least_s[at]
            if cell.forwards < count:
                rest = back + (count - cell.forwards) * forward + problem.least_s[0][3]
                bound = max(bound, begins[problem.owner[at]] + rest)
            back += forward
        return max(bound, *ends)

    def is_complete(self) -> bool:
        """Whether all actions are in."""
        return all(cell.backwards == self.problem.micro_batches and not cell.deferred for cell in self.cells)
