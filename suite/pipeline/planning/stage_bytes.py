"""What a stage holds while it runs its actions, in bytes.

    weights, their bf16 copies, optimizer state  always
    gradients                                    from the first B or I, which makes them layer by layer
    inputs of a micro-batch                      from its F to the end of its B or W: fill-drain holds M at its peak
    activations of a micro-batch                 from its R (or an F with graph) to its B or I: recomputed ones one at a
                                                 time
    deferred weight gradients                    from I to W
    peaks of forward, recompute, backward        while they run
    messages                                     received ahead, or sent and in flight (``flow_control``); between cells
                                                 of one stage until they are used

Section 2.3 of the paper counts N + L/K * N/M: the third and fourth row. The others complete the estimate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from suite.pipeline.schedule.action import Action, of_kind
from suite.pipeline.schedule.flow_control import FlowControl

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sent:
    """What a cell sends to another for each micro-batch: activations to a later one, gradients to an earlier one."""

    cells_downstream: int
    """How many cells later the other one is; negative for gradients."""
    bytes: int
    is_local: bool = False
    """Whether the other cell is on the same stage: no message is sent."""


@dataclass(frozen=True, slots=True)
class CellBytes:
    """The memory of one cell in bytes; what is not fixed is of one micro-batch."""

    input_bytes: int = 0
    """What it keeps of its inputs."""
    activation_bytes: int = 0
    forward_peak_bytes: int = 0
    graph_peak_bytes: int = 0
    """The peak of a forward with a graph."""
    backward_peak_bytes: int = 0
    received_gradient_bytes: int = 0
    """Gradients of its outputs, from later cells."""
    deferred_bytes: int = 0
    """Held from ``I`` to ``W``."""
    split_peak_bytes: int = 0
    """How much higher the peak of ``I`` is than that of ``B``: deferred gradients replace activations."""
    gradient_bytes: int = 0
    """Gradients of its parameters. None of them exists before the first backward of a step."""
    made_gradient_bytes: int = 0
    """How much higher the peak of a step's first backward is, because it makes the gradients."""
    fixed_bytes: int = 0
    """Weights, their bf16 copies, optimizer state, recorded moments of norms, and the process itself."""
    update_peak_bytes: int = 0
    local_input_bytes: int = 0
    """The part of ``input_bytes`` that comes from cells of the same stage."""
    local_gradient_bytes: int = 0
    """The part of ``received_gradient_bytes`` that comes from cells of the same stage."""
    sent: tuple[Sent, ...] = ()


class StageBytes:
    """The bytes that a stage holds, action by action."""

    def __init__(self, cells: Sequence[CellBytes], micro_batches: int, flow: FlowControl) -> None:
        self.cells, self._micro_batches, self._flow = cells, micro_batches, flow
        self.forwards, self.backwards = [0] * len(cells), [0] * len(cells)
        """How many have run in each cell."""
        self._in_flight: list[dict[int, deque[int]]] = [{} for _ in cells]
        """The bytes of the last messages of each cell: to its neighbours together, and to each cell further away."""
        activations, gradients = (min(flow.recvs_ahead(direction), micro_batches) for direction in (1, -1))
        self.held = sum(
            cell.fixed_bytes
            + activations * (cell.input_bytes - cell.local_input_bytes)
            + gradients * (cell.received_gradient_bytes - cell.local_gradient_bytes)
            for cell in cells
        )

    def run(self, kind: str, at: int) -> int:
        """Runs an action in one of the cells; returns the bytes while it runs. ``f`` is a forward without graph."""
        during, self.held = self.with_action(kind, at, runs=True)
        if kind in "Ff":
            self.forwards[at] += 1
        elif kind in "BI":
            self.backwards[at] += 1
        return during

    def with_action(self, kind: str, at: int, runs: bool = False) -> tuple[int, int]:
        """Returns the bytes while an action runs, and once it is done. With ``runs`` its messages are sent."""
        cell, held = self.cells[at], self.held
        if kind == "R":
            return held + cell.graph_peak_bytes, held + cell.activation_bytes
        if kind == "W":
            return held + cell.backward_peak_bytes, held - cell.deferred_bytes - cell.input_bytes
        if kind in "Ff":
            arriving = cell.input_bytes - cell.local_input_bytes
            held += self._more_than_posted(1, self.forwards[at]) * arriving
            after = held + self._in_flight_bytes(1, at, runs)
            if kind == "f":
                return held + cell.forward_peak_bytes, after
            return held + cell.graph_peak_bytes, after + cell.activation_bytes
        arriving = cell.received_gradient_bytes - cell.local_gradient_bytes
        held += self._more_than_posted(-1, self.backwards[at]) * arriving
        during = held + cell.backward_peak_bytes
        after = held - cell.received_gradient_bytes - cell.activation_bytes + self._in_flight_bytes(-1, at, runs)
        if kind == "I":
            during += cell.split_peak_bytes
            after += cell.deferred_bytes
        else:
            after -= cell.input_bytes
        if not self.backwards[at]:
            during += cell.made_gradient_bytes
            after += cell.gradient_bytes
        return during, after

    def _more_than_posted(self, direction: int, done: int) -> int:
        """Returns how many receives, 1 or 0, an action adds to those posted ahead: it uses one and posts the next."""
        return 1 if self._micro_batches - done > self._flow.recvs_ahead(direction) else 0

    def _in_flight_bytes(self, direction: int, at: int, runs: bool) -> int:
        """Returns what the messages of an action add to those in flight; the oldest of too many leave."""
        added, windows = 0, self._in_flight[at]
        for sent in self.cells[at].sent:
            if sent.cells_downstream * direction < 0:
                continue
            added += sent.bytes
            if sent.is_local:
                continue
            distance = abs(sent.cells_downstream)
            key = 0 if distance == 1 else sent.cells_downstream
            windows.setdefault(key, deque())
            if len(windows[key]) == self._flow.max_sends_to(distance):
                added -= windows[key][0]
                if runs:
                    windows[key].popleft()
            if runs:
                windows[key].append(sent.bytes)
        return added


def _kinds(actions: Sequence[Action]) -> Iterable[tuple[str, int]]:
    """Yields kind and cell of a stage's actions; ``f`` is a forward without graph."""
    recomputed = of_kind(actions, "R")
    for action in actions:
        is_dropped = action.kind == "F" and (action.virtual_stage, action.micro_batch) in recomputed
        yield "f" if is_dropped else action.kind, action.virtual_stage


def peak_bytes(actions: Sequence[Action], cells: Sequence[CellBytes], flow: FlowControl) -> int:
    """Returns the peak bytes while a stage of these cells runs its actions and then the update."""
    stage = StageBytes(cells, _micro_batches(actions), flow)
    peak = max((stage.run(kind, at) for kind, at in _kinds(actions)), default=0)
    return max(peak, update_bytes(cells))


def update_bytes(cells: Sequence[CellBytes]) -> int:
    """Returns the peak bytes of a stage's update."""
    standing = sum(cell.fixed_bytes + cell.gradient_bytes for cell in cells)
    return standing + max(cell.update_peak_bytes for cell in cells)


def _micro_batches(actions: Sequence[Action]) -> int:
    return sum(action.kind == "F" and action.virtual_stage == 0 for action in actions)


_SENT = "sent_activation_bytes", "sent_gradient_bytes"
"""What a cell sends to its neighbours."""

TERMS = (*(field.name for field in fields(CellBytes)[:10]), *_SENT)
"""The sizes that ``peak_terms`` counts."""

_BASE = 1 << 32
"""More than any count."""


def peak_terms(actions: Sequence[Action], at: int, flow: FlowControl) -> Ints:
    """Returns how often each size of one cell counts at the peaks of a stage's actions, (peaks, TERMS). So the peak of
    any cell, fixed bytes aside, is the largest of ``terms @ sizes``.

    The actions run on sizes that are powers of ``_BASE``: the digits of their sums are the counts. Rows that can never
    be the largest are left out. Gradients and activations replace each other in flight, but the first cell of a model
    sends no gradients and the last one no activations: the rows of such cells are among them.
    """
    sizes = {name: _BASE**power for power, name in enumerate(TERMS)}
    neighbours = [Sent(direction, sizes.pop(name)) for direction, name in zip((1, -1), _SENT, strict=True)]
    own = [kind for kind, of_cell in _kinds(actions) if of_cell == at]
    sums: set[int] = set()
    for sent in (neighbours, neighbours[:1], neighbours[1:]):
        stage = StageBytes([CellBytes(**sizes, sent=tuple(sent))], sum(kind in "Ff" for kind in own), flow)
        sums.update(stage.run(kind, 0) for kind in own)
    digits = [[total // _BASE**power % _BASE for power in range(len(TERMS))] for total in sums]
    return largest_rows(np.array(digits, dtype=np.int64).reshape(-1, len(TERMS)))


def largest_rows(rows: Ints) -> Ints:
    """Returns the rows of which no other one is at least as large in every column."""
    unique = np.unique(rows, axis=0)
    kept = unique[:0]
    for row in unique[np.argsort(-unique.sum(axis=1), kind="stable")]:
        if not (kept >= row).all(axis=1).any():
            kept = np.concatenate((kept, row[None]))
    return kept
