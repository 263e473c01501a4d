"""The least step time of a small pipeline, by trying all schedules; it shares no code with the search or the bound.

    clock        0    1    2    3           actions are appended in the order in which they start, each as soon as its
    stage 0      F0   F1   .    I0          stage and its messages allow: so every list of actions comes up
    stage 1      .    F0   I0   W0

Each cell takes micro-batches in order. A forward keeps its graph, or R precedes its backward; a backward is B, or I and
later W. Messages take no time and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from suite.pipeline.planning.simulate import CellCost
from suite.pipeline.planning.stage_memory import CellMemory

RECEIVED_AHEAD = 2
"""Inputs whose memory is allocated ahead (gloo)."""


@dataclass(frozen=True)
class Case:
    """A small pipeline: owner, cost and memory of each cell."""

    owners: tuple[int, ...]
    micro_batches: int
    costs: tuple[CellCost, ...]
    memory: tuple[CellMemory, ...]
    limit_bytes: int

    @property
    def stages(self) -> int:
        """K."""
        return 1 + max(self.owners)

    @property
    def stage_memory(self) -> list[list[CellMemory]]:
        """The memory of each stage's cells."""
        return [
            [cell for cell, owner in zip(self.memory, self.owners, strict=True) if owner == k]
            for k in range(self.stages)
        ]


@dataclass(frozen=True)
class Cell:
    """What a cell has done: when its forwards and backwards ended, which graphs are missing, how many W are left."""

    forwards: tuple[float, ...] = ()
    backwards: tuple[float, ...] = ()
    without_graph: frozenset[int] = frozenset()
    deferred: int = 0

    def held_bytes(self, memory: CellMemory, micro_batches: int) -> int:
        """Returns its bytes between actions."""
        alive = len(self.forwards) - len(self.backwards)
        inputs = alive + self.deferred + min(RECEIVED_AHEAD, micro_batches - len(self.forwards))
        graphs = (alive - len(self.without_graph)) * memory.activation_bytes
        return memory.fixed_bytes + graphs + inputs * memory.input_bytes + self.deferred * memory.deferred_bytes


@dataclass(frozen=True)
class State:
    """A step that has begun."""

    clock: float
    """When the last action started."""
    free: tuple[float, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Option:
    """An action that may come next in a cell."""

    arrival: float
    seconds: float
    peak_bytes: int
    """While it runs, beyond what is held before."""
    after: Cell
    """The cell afterwards, without the time of its end."""
    ends: str = ""
    """The list of the cell to which the end belongs."""


def options(case: Case, state: State, at: int) -> Iterator[Option]:
    """Yields all actions that a cell could run next: F, F without graph, R, B, I, W."""
    cell, cost, memory = state.cells[at], case.costs[at], case.memory[at]
    done, returned = len(cell.forwards), len(cell.backwards)
    came = state.cells[at - 1].forwards[done : done + 1] if at else (0.0,)
    if done < case.micro_batches and came:
        was_received = case.micro_batches - done <= RECEIVED_AHEAD
        inputs = 0 if was_received else memory.input_bytes
        without = replace(cell, without_graph=cell.without_graph | {done})
        yield Option(came[0], cost.recompute_s, inputs + memory.graph_peak_bytes, cell, "forwards")
        yield Option(came[0], cost.forward_s, inputs + memory.forward_peak_bytes, without, "forwards")
    if returned in cell.without_graph:
        with_graph = replace(cell, without_graph=cell.without_graph - {returned})
        yield Option(0.0, cost.recompute_s, memory.graph_peak_bytes, with_graph)
    elif returned < done:
        back = state.cells[at + 1].backwards[returned : returned + 1] if at + 1 < len(state.cells) else (0.0,)
        if back:
            split_s = cost.backward_s + cost.split_s - cost.weight_grad_s
            more = max(0, memory.deferred_bytes - memory.activation_bytes)
            split = replace(cell, deferred=cell.deferred + 1)
            yield Option(back[0], cost.backward_s, memory.backward_peak_bytes, cell, "backwards")
            yield Option(back[0], split_s, memory.backward_peak_bytes + more, split, "backwards")
    if cell.deferred:
        yield Option(0.0, cost.weight_grad_s, memory.backward_peak_bytes, replace(cell, deferred=cell.deferred - 1))


def next_states(case: Case, state: State) -> Iterator[State]:
    """Yields the step with one action more that starts at the clock or later and fits its stage."""
    for at, k in enumerate(case.owners):
        held = [
            cell.held_bytes(memory, case.micro_batches) if owner == k else 0
            for cell, memory, owner in zip(state.cells, case.memory, case.owners, strict=True)
        ]
        for option in options(case, state, at):
            start = max(option.arrival, state.free[k])
            end = start + option.seconds
            after = option.after
            if option.ends:
                after = replace(after, **{option.ends: (*getattr(after, option.ends), end)})
            bytes_after = sum(held) - held[at] + after.held_bytes(case.memory[at], case.micro_batches)
            if start >= state.clock and max(sum(held) + option.peak_bytes, bytes_after) <= case.limit_bytes:
                cells = (*state.cells[:at], after, *state.cells[at + 1 :])
                yield State(start, (*state.free[:k], end, *state.free[k + 1 :]), cells)


def least_end(case: Case, state: State) -> float:
    """Returns a time before which the step cannot end: each stage runs what is left to it."""
    left = [max(free, state.clock) for free in state.free]
    for cell, cost, k in zip(state.cells, case.costs, case.owners, strict=True):
        left[k] += (case.micro_batches - len(cell.forwards)) * cost.recompute_s
        left[k] += (case.micro_batches - len(cell.backwards)) * cost.backward_s
        left[k] += cell.deferred * cost.weight_grad_s + len(cell.without_graph) * cost.recompute_s
    return max(left)


def least_step_s(case: Case, below: float) -> float:
    """Returns the least step time, or ``below`` if none is less.

    Of steps that have done the same, those are dropped that are later in something and earlier in nothing than another.
    """
    begun = [State(0.0, (0.0,) * case.stages, (Cell(),) * len(case.owners))]
    while begun:
        fronts: dict[object, dict[tuple[float, ...], State]] = {}
        for state in begun:
            for after in next_states(case, state):
                if least_end(case, after) >= below:
                    continue
                if all(len(cell.backwards) == case.micro_batches and not cell.deferred for cell in after.cells):
                    below = max(after.free)
                    continue
                done = tuple((len(c.forwards), len(c.backwards), c.without_graph, c.deferred) for c in after.cells)
                times = (*(max(free, after.clock) for free in after.free), *_unused(after))
                front = fronts.setdefault(done, {})
                if not any(all(map(float.__le__, other, times)) for other in front):
                    for other in [other for other in front if all(map(float.__le__, times, other))]:
                        del front[other]
                    front[times] = after
        begun = [state for front in fronts.values() for state in front.values()]
    return below


def _unused(state: State) -> Iterator[float]:
    """Yields when the messages ended that the next cell has not used."""
    for cell, following in zip(state.cells, state.cells[1:], strict=False):
        yield from cell.forwards[len(following.forwards) :]
        yield from following.backwards[len(cell.backwards) :]
