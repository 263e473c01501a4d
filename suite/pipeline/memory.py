"""Bytes a stage needs, from the costs of its layers: what always stands, and the most that a walk of actions adds.

    weights, gradients, optimizer state          all the while
    inputs of a micro-batch                      from its F to the end of its B, or of its W if it has one, which may
                                                 need them: fill-drain has M before the first B
    activations of a micro-batch                 from its R (or an F with graph) to its B: rebuilt ones one at a time
    what a B put off                             from there to its W
    peaks of forward, rebuild, backward          while they last
    messages                                     received ahead, or sent and perhaps not taken (see ``transport``)

Section 2.3 of the paper counts N + L/K * N/M: the second and third row. The others make the estimate hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from suite.pipeline.action import Action, turns_of
from suite.pipeline.costs import LayerCost
from suite.pipeline.crossing import Crossing, crossings, given_twice
from suite.pipeline.transport import OUTSTANDING, WINDOW, outstanding
from suite.settings import OptimizerSettings

Ints = NDArray[np.int64]

SUNDRIES = 1 << 20
"""Bytes of what is not counted one by one: announcements, targets, losses, the allocator's rounding."""

FROZEN_BYTES = 4
"""Bytes of a value that is not trained: the weight, in fp32."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """One stage; all but ``fixed`` of one micro-batch. In bytes."""

    fixed: int
    """Weights, gradients, optimizer state, what norms note of all micro-batches, and what the process itself takes."""
    inputs: int
    activations: int
    forward_peak: int
    graph_peak: int
    backward_peak: int
    update_peak: int
    leaving: int
    """Sent to later stages by a forward."""
    coming_back: int
    """Received from them by a backward."""
    sent_back: int
    """Sent to the stages before by a backward."""
    put_off: int = 0
    """Held from a backward of the inputs to that of the weights."""
    far: int = 0
    """Skips under way to stages beyond the next, and gradients of such to stages before the one before, that are not
    counted with the neighbours' messages: whatever the action."""


def peak_bytes(actions: Sequence[Action], *cells: StageBytes, unsent: int = OUTSTANDING) -> int:
    """Returns the most bytes that stand at once while a stage of these cells walks its actions and then updates.

    Of the messages that a cell expects, ``WINDOW`` a direction have their room ahead; the last ``unsent`` that it
    sent (``transport.outstanding``) may not have left.
    """
    walk = np.array([(ord(action.kind), action.micro_batch, action.turn) for action in actions], dtype=np.int64)
    walk = walk.reshape(-1, 3).T
    stood = [_cell_bytes(walk, turn, cell, unsent) for turn, cell in enumerate(cells)]
    total = np.sum([between for between, _ in stood], axis=0)
    most = int(total[0])
    for turn, (between, during) in enumerate(stood):
        mine = walk[2] == turn
        most = max(most, int((total[:-1] - between[:-1] + during)[mine].max(initial=0)))
    return sum(cell.fixed for cell in cells) + max(most, max(cell.update_peak for cell in cells))


def _cell_bytes(walk: Ints, turn: int, cell: StageBytes, unsent: int) -> tuple[Ints, Ints]:
    """Returns the bytes of one cell between the actions of its stage, (actions + 1,), and while each lasts, (actions,).

    ``walk``, (3, actions), holds the kinds, micro-batches and turns. What others than the cell's own last is nothing.
    """
    kind, micro_batch, turns = walk
    forward, again, backward, weights = ((kind == ord(letter)) & (turns == turn) for letter in "FRBW")
    rebuilt, put_off = (np.isin(micro_batch, micro_batch[of]) for of in (again, weights))

    def count(begins: NDArray[np.bool_], ends: NDArray[np.bool_] | None = None) -> Ints:
        changes = begins.astype(np.int64) - (0 if ends is None else ends)
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(changes)))

    inputs = count(forward, weights | (backward & ~put_off))
    held = count(again | (forward & ~rebuilt), backward) * cell.activations
    held += count(backward & put_off, weights) * cell.put_off + cell.far
    sends = forward | backward
    size = np.where(forward, cell.leaving, cell.sent_back)[sends]
    sizes, number = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(size))), count(sends)
    held += sizes[number] - sizes[np.maximum(0, number - unsent)]
    ahead = np.minimum(WINDOW, forward.sum() - count(forward)) * cell.inputs
    ahead += np.minimum(WINDOW, backward.sum() - count(backward)) * cell.coming_back
    # what is put off takes the room of the activations that the backward lets go of
    split = np.where(put_off, max(0, cell.put_off - cell.activations), 0)
    peak = np.where(forward & rebuilt, cell.forward_peak, cell.graph_peak)
    peak = np.where(backward, cell.backward_peak + split + cell.coming_back, peak)
    peak = np.where(weights, cell.backward_peak, peak)
    during = held[:-1] + ahead[1:] + (inputs[:-1] + forward) * cell.inputs + peak
    return held + ahead + inputs * cell.inputs, during


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many micro-batches of a cell stand at once at most, over all cells of a schedule."""

    micro_batches: int
    inputs: int
    graphs: int
    put_off: int = 0
    drains: bool = True
    """Whether all forwards come before all backwards, and these begin with the last micro-batch. Then sent gradients
    take the room of freed inputs, and the graphs that are kept are those of the last forwards."""
    unsent: int = OUTSTANDING
    """Messages of a cell that may be under way."""
    several_on: int = 0
    """K, where stages hold several cells; 0 where each holds one."""

    @property
    def waiting(self) -> int:
        """How many micro-batches at least are not in the midst of a cell."""
        return self.micro_batches - self.inputs

    @staticmethod
    def of(schedule: Sequence[Sequence[Action]], micro_batches: int) -> Crowd:
        """Returns what a schedule brings together."""
        turns = turns_of(schedule)
        found = [_crowd(actions, turn) for actions in _distinct(schedule) for turn in range(turns)]
        inputs, graphs, put_off = (max(column, default=0) for column in zip(*(one[:3] for one in found), strict=True))
        drains, unsent = not put_off and all(one[3] for one in found), outstanding(len(schedule), turns)
        return Crowd(micro_batches, inputs, graphs, put_off, drains, unsent, len(schedule) if turns > 1 else 0)


def _distinct(schedule: Sequence[Sequence[Action]]) -> list[Sequence[Action]]:
    return list({tuple(actions): actions for actions in schedule}.values())


def _crowd(actions: Sequence[Action], turn: int) -> tuple[int, int, int, bool]:
    rebuilt = {action.micro_batch for action in actions if action.kind == "R" and action.turn == turn}
    inputs = graphs = later = 0
    most = [0, 0, 0]
    drains, last_backward = True, None
    put_off = {action.micro_batch for action in actions if action.kind == "W" and action.turn == turn}
    for action in actions:
        if action.turn != turn:
            continue
        kind, i = action.kind, action.micro_batch
        if last_backward is not None:
            drains = drains and not (kind == "F" or (kind == "B" and i > last_backward))
        last_backward = i if kind == "B" else last_backward
        inputs += kind == "F"
        graphs += kind == "R" or (kind == "F" and i not in rebuilt)
        most = [max(pair) for pair in zip(most, (inputs, graphs, later), strict=True)]
        inputs -= kind == "W" or (kind == "B" and i not in put_off)
        graphs -= kind == "B"
        later += (kind == "B" and i in put_off) - (kind == "W")
    return most[0], most[1], max(most[2], int(bool(put_off))), drains


def bytes_per_parameter(optimizer: OptimizerSettings, replicas: int) -> float:
    """Of a value that is trained: weight 4 and gradient 4, always fp32; AdamW adds two moments of 4.

    With replicas (ZeRO-1) each holds its share of the moments, and of a flat copy of the weights and of the reduced
    gradients. Adafactor keeps a number a row and column, not counted, and is not shared out. The bf16 copies that
    autocast makes of weights are among a layer's activations.
    """
    if optimizer.name == "adafactor":
        return 8.0
    return 8.0 + (8.0 if replicas == 1 else 16.0 / replicas)


class CellBytes:
    """Bytes of any cell of consecutive layers, as a stage of a pipeline."""

    def __init__(self, costs: Sequence[LayerCost], crowd: Crowd, per_parameter: float, process: int = 0) -> None:
        """``per_parameter`` bytes stand for each value all the while, ``FROZEN_BYTES`` for each that is not trained;
        ``process`` are those of a worker without any."""
        self.crowd, self._micro_batches = crowd, crowd.micro_batches
        self._per_parameter, self._process = per_parameter, process
        self._layers = len(costs)

        def column(name: str) -> Ints:
            return np.array([getattr(cost, name) for cost in costs], dtype=np.int64)

        zero = np.zeros(1, dtype=np.int64)
        self._inputs = np.append(column("boundary"), zero)  # at L: nothing leaves the last layer
        self._gradients = np.append(column("gradient"), zero)
        frozen = column("frozen")
        self._trained = np.concatenate((zero, np.cumsum(column("parameters") - frozen)))
        self._frozen = np.concatenate((zero, np.cumsum(frozen)))
        self._alive = np.concatenate((zero, np.cumsum(column("activations"))))
        self._noted = np.concatenate((zero, np.cumsum(self._micro_batches * column("noted"))))
        self._put_off = np.concatenate((zero, np.cumsum(column("put_off"))))
        given = self._gradients[1:]
        self._first_peak = column("forward_peak")
        self._later_peak = _RangeMaximum(np.append(self._first_peak + self._inputs[:-1], zero))
        self._graph_peak = _RangeMaximum(self._alive[:-1] + column("graph_peak"))
        self._last_backward_peak = self._alive[1:] + column("backward_peak")
        self._backward_peak = _RangeMaximum(self._last_backward_peak + given)
        self._update_peak = _RangeMaximum(column("update_peak"))
        self._crossings = crossings(costs)
        self._leaving = _RangeMaximum(self._inputs[1:])
        twice = self._summed(given_twice)[1:]
        self._twice = _RangeMaximum(twice)
        self._coming_back = _RangeMaximum(given + twice)
        self._far = _RangeMaximum(self._summed(self._farthest)[1:])
        self._far_back = self._summed(self._farthest_back)

    def stage(self, begin: int, end: int) -> StageBytes:
        """Returns the bytes of the cell of layers ``begin`` to ``end``, exclusive, between no more than two others."""
        cells = [range(begin), range(begin, end), range(end, self._layers)]
        return self.among([cell for cell in cells if cell], 1 if begin else 0)

    def among(self, cells: Sequence[range], k: int) -> StageBytes:
        """Returns the bytes of one of these cells; what stays on its stage is no message, of sent ones nor of those
        that are expected."""
        begin, end = cells[k][0], cells[k][-1] + 1
        beyond = cells[k + 1][-1] + 1 if k + 1 < len(cells) else end
        before, after = self._crossings[begin], self._crossings[end]
        passing = [skip for skip in before if skip.taker >= end and skip.apart_at(begin)]
        older = [skip for skip in after if skip.giver < begin]
        twice = sum(skip.gradient for skip in after if not skip.apart_at(end) and skip.taker >= beyond)
        parts = self._parts(np.array([begin]), np.array([end]), self._inputs[[end]], self._gradients[[end]])
        whole = StageBytes(*(int(part[0]) for part in parts))
        given, taken = self._staying(cells, k)
        return replace(
            whole,
            inputs=whole.inputs - sum(skip.bytes for skip in passing),
            sent_back=max(0, whole.sent_back - sum(skip.gradient for skip in (*passing, *taken))),
            leaving=whole.leaving - sum(skip.bytes for skip in (*older, *given) if skip in older or skip.apart_at(end)),
            coming_back=whole.coming_back - sum(skip.gradient for skip in older) + twice,
            backward_peak=whole.backward_peak + twice,  # both gradients are added up in a third tensor
            far=self._far_bytes(cells, k),
        )

    def _staying(self, cells: Sequence[range], k: int) -> tuple[list[Crossing], list[Crossing]]:
        """Returns the skips that a cell gives to another of its stage, and those that it takes from one."""
        stages = self.crowd.several_on
        if not stages:
            return [], []
        of_stage = {layer for cell in cells[k % stages :: stages] for layer in cell}.difference(cells[k])
        given = [
            skip for skip in self._crossings[cells[k][-1] + 1] if skip.giver in cells[k] and skip.taker in of_stage
        ]
        taken = [skip for skip in self._crossings[cells[k][0]] if skip.taker in cells[k] and skip.giver in of_stage]
        return given, taken

    def _far_bytes(self, cells: Sequence[range], k: int) -> int:
        """Messages under way to cells beyond the neighbours, beside those that the walk counts with the neighbours'.

        What was sent forward is held until the step ends, or until more is sent there. To the neighbour gradients
        follow and take its place, but for the first cell, which sends none. What stays on the stage waits for its other
        cell, of a group of K micro-batches at most; ``WINDOW`` of them count there, as if they were expected.
        """
        cell_of = {layer: at for at, cell in enumerate(cells) for layer in cell}
        given, taken = self._staying(cells, k)
        waiting = max(0, min(self._micro_batches, self.crowd.several_on) - WINDOW)
        forward, back = (waiting * sum(sizes) for sizes in ([s.bytes for s in given], [s.gradient for s in taken]))
        for skip in self._crossings[cells[k][-1] + 1]:
            distance = cell_of[skip.taker] - k
            if skip.giver in cells[k] and distance > 1 and skip not in given:
                forward += self._sent_far(distance, beside=self.crowd.unsent if k == 0 else 0) * skip.bytes
        for skip in self._crossings[cells[k][0]]:
            distance = k - cell_of[skip.giver]
            if skip.taker in cells[k] and distance > 1 and skip not in taken:
                back += self._sent_far(distance, beside=self.crowd.unsent) * skip.gradient
        return forward + back

    def _sent_far(self, distance: int, beside: int) -> int:
        """Returns how many messages may be under way over a distance in cells, ``beside`` so many that are counted."""
        under_way = min(self._micro_batches, self.crowd.unsent + distance - 1)
        return under_way - min(self._micro_batches, beside)

    def _farthest(self, front: int, skip: Crossing) -> int:
        """The most that can be under way of a skip behind a front, were each layer after it a stage."""
        return self._sent_far(skip.taker - front + 1, beside=0) * skip.bytes if skip.taker > front else 0

    def _farthest_back(self, front: int, skip: Crossing) -> int:
        """The same of its gradients before a front; of those that stay on a stage none is counted as sent."""
        beside = WINDOW if self.crowd.several_on else self.crowd.unsent
        return self._sent_far(front - skip.giver, beside) * skip.gradient if skip.giver < front - 1 else 0

    def _summed(self, of: Callable[[int, Crossing], int]) -> Ints:
        sums = [sum(of(front, skip) for skip in crossing) for front, crossing in enumerate(self._crossings)]
        return np.array(sums, dtype=np.int64)

    def needs(self, begin: int, end: int) -> int:
        """Returns a bound of the cell's peak, in closed form: what ``reach`` holds against the limit."""
        return int(self._needs(np.array([begin]), np.array([end]))[0])

    def reach(self, limit: int) -> list[int]:
        """Returns for each layer the end, exclusive, of the longest cell that begins there and fits ``limit`` bytes.

        Messages count here by the largest boundary inside the cell, so that whatever ends before a fitting end fits.
        """
        begin, end = np.arange(self._layers), np.arange(self._layers)
        step = 1 << self._layers.bit_length()
        while step:
            longer = end + step
            inside = longer <= self._layers
            fits = np.zeros(self._layers, dtype=bool)
            fits[inside] = self._needs(begin[inside], longer[inside]) <= limit
            end = np.where(fits, longer, end)
            step //= 2
        return [int(at) for at in end]

    def _needs(self, begin: Ints, end: Ints) -> Ints:
        """The peak of a walk in closed form, for many cells at once; never below ``peak_bytes``."""
        fixed, inputs, activations, forward, graph, backward, update, leaving, coming_back, sent_back, put_off = (
            self._parts(begin, end, self._leaving(begin, end), self._coming_back(begin, end))
        )
        crowd, graphs = self.crowd, max(1, self.crowd.graphs)
        expected, unsent = min(WINDOW + 1, self._micro_batches), min(crowd.unsent, self._micro_batches)
        returned = min(crowd.unsent, self._micro_batches - 1)  # each in the room of the inputs that its B let go
        filling = (graphs - 1) * activations + np.maximum(forward, graph)
        if not crowd.drains:  # a forward without graph may find as many graphs standing as ever do
            filling = np.maximum(filling, graphs * activations + forward)
        backward = backward + self._twice(begin, end)
        draining = np.maximum((graphs - 1) * activations + graph, graphs * activations + backward)
        messages = expected * coming_back + self._far(begin, end) + self._far_back[begin]
        if crowd.drains:
            messages = messages + unsent * leaving + returned * np.maximum(0, sent_back - inputs)
        else:
            larger, smaller = np.maximum(leaving, sent_back), np.minimum(leaving, sent_back)
            messages = messages + unsent * larger + min(crowd.unsent - unsent, self._micro_batches) * smaller
        if crowd.put_off:
            messages = messages + crowd.put_off * put_off + np.maximum(0, put_off - activations)
        kept = min(self._micro_batches, crowd.inputs + WINDOW)
        standing = kept * inputs + np.maximum(filling, draining) + messages
        needs: Ints = fixed + np.maximum(standing, update)
        return needs

    def _parts(self, begin: Ints, end: Ints, leaving: Ints, coming_back: Ints) -> tuple[Ints, ...]:
        """The fields of StageBytes, in their order."""
        weights = self._per_parameter * (self._trained[end] - self._trained[begin])
        weights = weights + FROZEN_BYTES * (self._frozen[end] - self._frozen[begin])
        inputs, sent_back = self._inputs[begin], np.where(begin == 0, 0, self._gradients[begin])
        # the first layer's inputs are among those that are kept, a later one's stand beside them
        later = np.where(end - begin > 1, self._later_peak(begin + 1, np.maximum(end, begin + 2)), 0)
        forward = np.maximum(self._first_peak[begin], later)
        # the gradient given to the last layer is a message and counted as one, that of a layer before it is not
        before = np.where(end - begin > 1, self._backward_peak(begin, np.maximum(end - 1, begin + 1)), 0)
        backward = np.maximum(before, self._last_backward_peak[end - 1])
        return (
            np.ceil(weights).astype(np.int64) + self._noted[end] - self._noted[begin] + self._process + SUNDRIES,
            inputs,
            self._alive[end] - self._alive[begin],
            forward,
            self._graph_peak(begin, end) - self._alive[begin],
            backward - self._alive[end],
            self._update_peak(begin, end),
            leaving,
            coming_back,
            sent_back,
            self._put_off[end] - self._put_off[begin],
        )


class _RangeMaximum:
    """The maximum of any stretch of a list, for many stretches at once: maxima of stretches of 1, 2, 4, ..."""

    def __init__(self, values: Ints) -> None:
        self._tables = [values]
        for level in range(max(1, len(values)).bit_length() - 1):
            half = 1 << level
            table = self._tables[-1].copy()
            table[:-half] = np.maximum(table[:-half], self._tables[-1][half:])
            self._tables.append(table)
        self._stacked = np.stack(self._tables)

    def __call__(self, begin: Ints, end: Ints) -> Ints:
        """Returns max(values[begin:end]) for each pair; no stretch may be empty."""
        level = np.frexp(end - begin)[1] - 1
        result: Ints = np.maximum(self._stacked[level, begin], self._stacked[level, end - (1 << level)])
        return result
