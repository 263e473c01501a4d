"""Bytes a stage needs while it runs its actions: the peak over a schedule.

    weights, their bf16 copies, optimizer state  always
    gradients                                    from the first B or I, which makes them layer by layer
    inputs of a micro-batch                      from its F to the end of its B or W: fill-drain holds M at its peak
    activations of a micro-batch                 from its R (or an F with graph) to its B or I: recomputed ones one at a
                                                 time
    deferred weight gradients                    from I to W
    peaks of forward, recompute, backward        while they run
    messages                                     received ahead, or sent and in flight (``runtime.p2p``)

Section 2.3 of the paper counts N + L/K * N/M: the third and fourth row. The others complete the estimate.
``suite.pipeline.planning.memory`` adds up the bytes of a cell from the costs of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import CellPair, TransportName
from suite.pipeline.schedule.action import EFFECTS, KINDS, Action, virtual_stages_of
from suite.pipeline.schedule.flow_control import GLOO, FlowControl, flow_control

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CellMemory:
    """Memory of one cell in bytes; all but ``fixed_bytes`` for one micro-batch."""

    fixed_bytes: int
    """Weights, their bf16 copies, gradients, optimizer state, recorded moments of norms, and the process itself."""
    input_bytes: int
    activation_bytes: int
    forward_peak_bytes: int
    graph_peak_bytes: int
    backward_peak_bytes: int
    update_peak_bytes: int
    sent_activation_bytes: int
    """Sent by a forward to later cells."""
    received_gradient_bytes: int
    """Received by a backward from later cells."""
    sent_gradient_bytes: int
    """Sent by a backward to previous cells."""
    deferred_bytes: int = 0
    """Held from ``I`` to ``W``."""
    far_message_bytes: int = 0
    """Skips in flight to cells beyond the next, and their gradients to cells before the previous one, that are not
    counted with the neighbours' messages; at any time."""
    gradient_bytes: int = 0
    """The gradients among ``fixed_bytes``. None of them exists before the first backward of a step."""
    made_gradient_bytes: int = 0
    """How much higher the peak of a step's first backward is, because it allocates the gradients."""


def peak_bytes(actions: Sequence[Action], *cells: CellMemory, flow: FlowControl = GLOO) -> int:
    """Returns the peak bytes while a stage of these cells runs its actions and then the update.

    As ``flow`` says, receives are allocated ahead, and the last messages that a cell sent may still be in flight.
    """
    walks = _cell_walks(actions, len(cells))
    per_cell = [_cell_bytes(*pair, flow) for pair in zip(walks, cells, strict=True)]
    total = np.sum([between for between, _ in per_cell], axis=0)
    peak = int(total[0])
    for walk, (between, during) in zip(walks, per_cell, strict=True):
        peak = max(peak, int((total[:-1] - between[:-1] + during)[walk.own].max(initial=0)))
    return sum(cell.fixed_bytes for cell in cells) + max(peak, max(cell.update_peak_bytes for cell in cells))


@dataclass(frozen=True, slots=True)
class _CellWalk:
    """The effects of a stage's actions on one cell (``suite.pipeline.schedule.action.Effect``), (actions,) each; zero
    for actions of other cells."""

    own: Flags
    """Which actions are this cell's."""
    micro_batch: Ints
    direction: Ints
    inputs: Ints
    graphs: Ints
    deferred: Ints


_EFFECTS: Ints = np.array([astuple(EFFECTS[kind]) for kind in KINDS])


def _cell_walks(actions: Sequence[Action], virtual_stages: int) -> list[_CellWalk]:
    """Returns the walk of each cell of a stage."""
    rows = [(KINDS.index(action.kind), action.micro_batch, action.virtual_stage) for action in actions]
    kind, micro_batch, cell = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    walks = []
    for virtual_stage in range(virtual_stages):
        own = cell == virtual_stage
        direction, inputs, graphs, deferred = _EFFECTS[kind].T * own
        recompute = own & (kind == KINDS.index("R"))
        without_graph = (direction > 0) & np.isin(micro_batch, micro_batch[recompute])
        walks.append(_CellWalk(own, micro_batch, direction, inputs, graphs - without_graph, deferred))
    return walks


def running_sum(changes: Ints | Flags) -> Ints:
    """Returns the sums of the changes before each action, and after the last one, (actions + 1,)."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(changes)))


def _cell_bytes(walk: _CellWalk, cell: CellMemory, flow: FlowControl) -> tuple[Ints, Ints]:
    """Returns the bytes of one cell between the actions of its stage, (actions + 1,), and during each, (actions,).

    Ignore values during other cells' actions.
    """
    forward, backward = walk.direction > 0, walk.direction < 0
    inputs, forwards, backwards = running_sum(walk.inputs), running_sum(forward), running_sum(backward)
    held = running_sum(walk.graphs) * cell.activation_bytes + running_sum(walk.deferred) * cell.deferred_bytes
    held += cell.far_message_bytes
    held -= (backwards == 0) * cell.gradient_bytes
    # the first cell sends no gradients and the last one no activations
    is_sent = forward & (cell.sent_activation_bytes > 0) | backward & (cell.sent_gradient_bytes > 0)
    sent = running_sum(np.where(forward, cell.sent_activation_bytes, cell.sent_gradient_bytes)[is_sent])
    sends = running_sum(is_sent)
    held += sent[sends] - sent[np.maximum(0, sends - flow.max_inflight_sends)]
    ahead = np.minimum(flow.recvs_ahead(1), forward.sum() - forwards) * cell.input_bytes
    ahead += np.minimum(flow.recvs_ahead(-1), backward.sum() - backwards) * cell.received_gradient_bytes
    # deferred gradients replace the activations that the backward frees
    split = np.where(walk.deferred > 0, max(0, cell.deferred_bytes - cell.activation_bytes), 0)
    peak = np.where(forward & (walk.graphs == 0), cell.forward_peak_bytes, cell.graph_peak_bytes)
    peak = np.where(backward, cell.backward_peak_bytes + split + cell.received_gradient_bytes, peak)
    peak = np.where(backward & (backwards[:-1] == 0), peak + cell.made_gradient_bytes, peak)
    peak = np.where(walk.deferred < 0, cell.backward_peak_bytes, peak)
    during = held[:-1] + ahead[1:] + (inputs[:-1] + forward) * cell.input_bytes + peak
    return held + ahead + inputs * cell.input_bytes, during


@dataclass(frozen=True, slots=True)
class InFlightPeaks:
    """The most micro-batches of a cell in flight at once, over all cells of a schedule."""

    micro_batches: int
    inputs: int
    graphs: int
    deferred: int
    fill_then_drain: bool
    """Whether all forwards come before all backwards, and these start at the last micro-batch. Then sent gradients
    replace freed inputs, and the kept graphs are those of the last forwards."""
    flow: FlowControl
    """The messages of a cell in flight."""
    placement: CellPlacement
    waiting: Mapping[CellPair, tuple[int, int]]
    """The most activations, and gradients, that wait between two cells of one stage, by the pair."""

    @staticmethod
    def of(
        schedule: Sequence[Sequence[Action]],
        micro_batches: int,
        transport: TransportName = "gloo",
        cell_to_stage: tuple[int, ...] = (),
    ) -> InFlightPeaks:
        """Returns the peaks of a schedule; ``cell_to_stage`` as in ``CellPlacement``."""
        virtual_stages, placement = virtual_stages_of(schedule), CellPlacement(len(schedule), cell_to_stage)
        of_actions = {actions: _cell_walks(actions, virtual_stages) for actions in {*map(tuple, schedule)}}
        walks = [walk for cells in of_actions.values() for walk in cells]
        inputs, graphs, deferred = (
            max((int(running_sum(getattr(walk, name)).max()) for walk in walks), default=0)
            for name in ("inputs", "graphs", "deferred")
        )
        return InFlightPeaks(
            micro_batches,
            inputs,
            graphs,
            deferred,
            fill_then_drain=not deferred and all(map(_fills_then_drains, walks)),
            flow=flow_control(transport, len(schedule), virtual_stages),
            placement=placement,
            waiting={
                (placement.cell_of(source, k), placement.cell_of(target, k)): _most_waiting(
                    of_actions[tuple(actions)][source], of_actions[tuple(actions)][target]
                )
                for k, actions in enumerate(schedule)
                for source, target in combinations(range(virtual_stages), 2)
            },
        )


def _most_waiting(source: _CellWalk, target: _CellWalk) -> tuple[int, int]:
    """Returns the most activations, and gradients, that one cell has sent to the other and that it has not used."""
    activations: Ints = np.cumsum(source.direction > 0) - np.cumsum(target.direction > 0)
    gradients: Ints = np.cumsum(target.direction < 0) - np.cumsum(source.direction < 0)
    return int(activations.max(initial=0)), int(gradients.max(initial=0))


def _fills_then_drains(walk: _CellWalk) -> bool:
    forward, backward = walk.direction > 0, walk.direction < 0
    forward_after_backward = (np.cumsum(backward)[forward] > 0).any()
    return not forward_after_backward and bool((np.diff(walk.micro_batch[backward]) <= 0).all())
