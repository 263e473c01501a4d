"""The least step time of a small pipeline, by dynamic programming over all schedules; it shares no code with the search
or the bound.

    a stage   F0 F1 I0 ..    what it has done says which actions fit its memory, and what it still needs at least
    a step    clock          actions are appended in the order in which they start, each as soon as its stage and its
                             messages allow: so every list of actions comes up. Of steps that have done the same, one
                             that is later in nothing makes the others superfluous, as is one that cannot end in time

Each cell takes micro-batches in order. A forward keeps its graph, or R precedes its backward; a backward is B, or I and
later W. Messages take no time and no memory. Costs are whole numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from suite.pipeline.planning.simulate import CellCost
from suite.pipeline.planning.stage_bytes import CellBytes

RECEIVED_AHEAD = 2
"""Inputs whose memory is allocated ahead (gloo)."""

NEVER = 1 << 14
"""More seconds than any step takes."""

COMPARED = 24
"""With so many other steps each is compared. More make no step wrong, only fewer of them superfluous."""


@dataclass(frozen=True)
class Case:
    """A small pipeline: stage, cost and memory of each cell."""

    cell_to_stage: tuple[int, ...]
    micro_batches: int
    costs: tuple[CellCost, ...]
    memory: tuple[CellBytes, ...]
    limit_bytes: int

    @property
    def stages(self) -> int:
        """K."""
        return 1 + max(self.cell_to_stage)

    @property
    def stage_bytes(self) -> list[list[CellBytes]]:
        """The memory of each stage's cells."""
        return [
            [cell for cell, stage in zip(self.memory, self.cell_to_stage, strict=True) if stage == k]
            for k in range(self.stages)
        ]


@dataclass(frozen=True)
class Cell:
    """What a cell has done: numbers of forwards, of backwards, of W that are left, and which graphs are missing."""

    forwards: int = 0
    backwards: int = 0
    without_graph: frozenset[int] = frozenset()
    deferred: int = 0

    @property
    def progress(self) -> int:
        """More after any action."""
        return 3 * (self.forwards + self.backwards) - len(self.without_graph) - self.deferred

    def held_bytes(self, memory: CellBytes, micro_batches: int) -> int:
        """Returns its bytes between actions."""
        alive = self.forwards - self.backwards
        inputs = alive + self.deferred + min(RECEIVED_AHEAD, micro_batches - self.forwards)
        graphs = (alive - len(self.without_graph)) * memory.activation_bytes
        return memory.fixed_bytes + graphs + inputs * memory.input_bytes + self.deferred * memory.deferred_bytes


@dataclass(frozen=True)
class Option:
    """An action that may come next in a cell: F, f without graph, R, B, I or W."""

    kind: str
    seconds: float
    peak_bytes: int
    """While it runs, beyond what is held before."""
    after: Cell
    least_after_s: int = 0
    """What must follow, on whichever stages."""


class Times:
    """The least seconds of each cell's forward and backward, and those that follow them: by cell and micro-batch."""

    def __init__(self, case: Case) -> None:
        count, last = case.micro_batches, len(case.costs) - 1
        self.forward = [int(min(cost.forward_s, cost.recompute_s)) for cost in case.costs]
        self.backward = [int(cost.backward_s + min(0, cost.split_s - cost.weight_grad_s)) for cost in case.costs]
        self.after_backward, self.after_forward = (np.zeros((last + 2, count + 1), int) for _ in range(2))
        for i in reversed(range(count)):
            for at, backward in enumerate(self.backward):
                own = backward + self.after_backward[at, i + 1] if i + 1 < count else 0
                previous = self.backward[at - 1] + self.after_backward[at - 1, i] if at else 0
                self.after_backward[at, i] = max(own, previous)
            for at in reversed(range(last + 1)):
                own = self.forward[at] + self.after_forward[at, i + 1] if i + 1 < count else 0
                following = self.forward[at + 1] + self.after_forward[at + 1, i] if at < last else 0
                returned = self.backward[at] + self.after_backward[at, i]
                self.after_forward[at, i] = max(own, following, returned)


def options(case: Case, times: Times, cell: Cell, at: int) -> Iterator[Option]:
    """Yields all actions that a cell could run next if its messages are there."""
    cost, memory, done, returned = case.costs[at], case.memory[at], cell.forwards, cell.backwards
    after_s = int(times.after_backward[at, returned])
    if done < case.micro_batches:
        was_received = case.micro_batches - done <= RECEIVED_AHEAD
        inputs, kept = 0 if was_received else memory.input_bytes, replace(cell, forwards=done + 1)
        dropped, least_s = replace(kept, without_graph=cell.without_graph | {done}), int(times.after_forward[at, done])
        yield Option("F", cost.recompute_s, inputs + memory.graph_peak_bytes, kept, least_s)
        yield Option("f", cost.forward_s, inputs + memory.forward_peak_bytes, dropped, least_s)
    if returned in cell.without_graph:
        with_graph = replace(cell, without_graph=cell.without_graph - {returned})
        yield Option("R", cost.recompute_s, memory.graph_peak_bytes, with_graph, times.backward[at] + after_s)
    elif returned < done:
        split_s, whole = cost.backward_s + cost.split_s - cost.weight_grad_s, replace(cell, backwards=returned + 1)
        split = replace(whole, deferred=cell.deferred + 1)
        yield Option("B", cost.backward_s, memory.backward_peak_bytes, whole, after_s)
        yield Option("I", split_s, memory.backward_peak_bytes + memory.split_peak_bytes, split, after_s)
    if cell.deferred:
        yield Option("W", cost.weight_grad_s, memory.backward_peak_bytes, replace(cell, deferred=cell.deferred - 1))


@dataclass(frozen=True)
class Move:
    """The actions of one kind in one cell: from each state of its stage, by number."""

    at: int
    kind: str
    seconds: int
    after: np.ndarray
    """The state afterwards; -1 where the action does not fit, or is not next."""
    least_s: np.ndarray
    """From its start to the end of the step."""

    @property
    def direction(self) -> int:
        """1 of a forward, -1 of a backward."""
        return {"F": 1, "f": 1, "B": -1, "I": -1}.get(self.kind, 0)


class Stage:
    """All that a stage may have done, as numbered states."""

    def __init__(self, case: Case, times: Times, k: int) -> None:
        own = [at for at, stage in enumerate(case.cell_to_stage) if stage == k]
        self.states = [(Cell(),) * len(own)]
        numbers, found, self.is_roomy = {self.states[0]: 0}, [], True

        def held_bytes(state: tuple[Cell, ...]) -> int:
            return sum(
                cell.held_bytes(case.memory[at], case.micro_batches) for at, cell in zip(own, state, strict=True)
            )

        for number, state in enumerate(self.states):  # which grow
            for v, at in enumerate(own):
                for option in options(case, times, state[v], at):
                    after = (*state[:v], option.after, *state[v + 1 :])
                    if max(held_bytes(state) + option.peak_bytes, held_bytes(after)) > case.limit_bytes:
                        self.is_roomy = False
                        continue
                    if after not in numbers:
                        numbers[after] = len(self.states)
                        self.states.append(after)
                    found.append((at, option, number, numbers[after]))
        self.progress = np.array([sum(cell.progress for cell in state) for state in self.states])
        passed = np.array([[(cell.forwards, cell.backwards) for cell in state] for state in self.states])
        self.passed = dict(zip(own, passed.transpose(1, 2, 0), strict=True))
        """Of each cell, the forwards and backwards in each state, (2, states)."""
        self.rest_s = np.full(len(self.states), NEVER)
        """The least seconds to the end of the step, if no message is late."""
        done = (Cell(case.micro_batches, case.micro_batches),) * len(own)
        self.rest_s[[numbers[done]] if done in numbers else []] = 0
        self.moves: dict[object, Move] = {}
        for at, option, number, after in sorted(found, key=lambda each: -self.progress[each[2]]):
            nowhere = np.full(len(self.states), -1), np.full(len(self.states), NEVER)
            move = self.moves.setdefault((at, option.kind), Move(at, option.kind, int(option.seconds), *nowhere))
            if self.rest_s[after] < NEVER:
                move.after[number] = after
                move.least_s[number] = move.seconds + max(option.least_after_s, self.rest_s[after])
                self.rest_s[number] = min(self.rest_s[number], move.least_s[number])


class Steps:
    """Steps that have begun, a row each; all have made the same progress."""

    def __init__(self, states: np.ndarray, free: np.ndarray, clock: np.ndarray, ends: np.ndarray) -> None:
        self.states = states
        """The state of each stage, (steps, K)."""
        self.free = free
        """When it has done its own, (steps, K)."""
        self.clock = clock
        """When the last action started, (steps,)."""
        self.ends = ends
        """Of the messages that a cell has not used, forward and back, (steps, cells, 2, M); 0 if there is none."""

    def of(self, rows: np.ndarray) -> Steps:
        return Steps(self.states[rows], self.free[rows], self.clock[rows], self.ends[rows])

    @staticmethod
    def joined(parts: list[Steps]) -> Steps:
        names = "states", "free", "clock", "ends"
        return Steps(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def needed(self, cell_to_stage: tuple[int, ...], counts: list[int]) -> Steps:
        """Returns the steps without those that are later in something and earlier in nothing than another one."""
        begins = np.maximum(self.free, self.clock[:, None])
        of_receivers = begins[:, list(cell_to_stage)][:, :, None, None]
        waits = np.where(self.ends > 0, np.maximum(self.ends, of_receivers), 0)
        times = np.concatenate([begins, waits.reshape(len(begins), -1)], axis=1)
        key = np.ravel_multi_index(self.states.T, counts)
        order = np.lexsort((times.sum(1), key))
        key, times, keeps = key[order], times[order], np.ones(len(key), bool)
        for distance in range(1, min(COMPARED, len(key) - 1) + 1):
            rows = distance + np.flatnonzero((key[distance:] == key[:-distance]) & keeps[distance:])
            keeps[rows[(times[rows - distance] <= times[rows]).all(1)]] = False
        return self.of(order[keeps])


def least_step_s(case: Case, below: float) -> float:
    """Returns the least step time, or ``below`` if none is less."""
    times = Times(case)
    stages = [Stage(case, times, k) for k in range(case.stages)]
    alone_s = sum(cost.forward_s + cost.recompute_s + cost.backward_s + cost.split_s for cost in case.costs)
    limit = min(below, case.micro_batches * alone_s + 1)
    free, shape = np.zeros((1, case.stages), np.int16), (1, len(case.cell_to_stage), 2, case.micro_batches)
    begun = Steps(free, free, free[:, 0], np.zeros(shape, np.int16))
    waiting = defaultdict(list, {0: [begun]} if all(stage.rest_s[0] < NEVER for stage in stages) else {})
    while waiting:
        progress = min(waiting)
        steps = Steps.joined(waiting.pop(progress)).needed(case.cell_to_stage, [len(stage.states) for stage in stages])
        if progress == 6 * case.micro_batches * len(case.cell_to_stage):
            return int(steps.free.max(1).min())
        for k in range(case.stages):
            for more, longer in _appended(case, stages, k, steps, limit):
                waiting[progress + more].append(longer)
    return below


def _appended(case: Case, stages: list[Stage], k: int, steps: Steps, below: float) -> Iterator[tuple[int, Steps]]:
    """Yields the steps that can end in time with one action more of a stage, and the progress that it makes. None waits
    so long that a W, or anything if there is room for all, fits in before it."""
    stage, state, cells = stages[k], steps.states[:, k], range(len(case.cell_to_stage))
    passed = [stages[its].passed[at][:, steps.states[:, its]] for at, its in enumerate(case.cell_to_stage)]
    choices, first_end = [], np.full(len(state), NEVER)
    for move in stage.moves.values():
        can_run, start = move.after[state] >= 0, steps.free[:, k].astype(int)
        source, back = move.at - move.direction, int(move.direction < 0)
        if move.direction and source in cells:
            can_run &= passed[source][back] > passed[move.at][back]
            start = np.maximum(start, steps.ends[:, move.at, back, 0])
        if stage.is_roomy or move.kind == "W":
            first_end = np.minimum(first_end, np.where(can_run, start + move.seconds, NEVER))
        choices.append((move, can_run & (start >= steps.clock) & (start + move.least_s[state] < below), start))
    for move, can_run, start in choices:
        rows = np.flatnonzero(can_run & ((start < first_end) | (start + move.seconds <= first_end)))
        longer, target, back = steps.of(rows), move.at + move.direction, int(move.direction < 0)
        end = start[rows] + move.seconds
        longer.states[:, k], longer.free[:, k], longer.clock[:] = move.after[state[rows]], end, start[rows]
        if move.direction:
            longer.ends[:, move.at, back] = np.pad(longer.ends[:, move.at, back, 1:], ((0, 0), (0, 1)))
            if target in cells:
                place = passed[move.at][back, rows] - passed[target][back, rows]
                longer.ends[np.arange(len(rows)), target, back, place] = end
        begins = np.maximum(longer.free, longer.clock[:, None])
        rest_s = np.stack([each.rest_s[longer.states[:, j]] for j, each in enumerate(stages)], axis=1)
        made = stage.progress[longer.states[:, k]] - stage.progress[state[rows]]
        made[(begins + rest_s).max(1, initial=0) >= below] = 0
        yield from ((int(more), longer.of(made == more)) for more in np.unique(made[made > 0]))
