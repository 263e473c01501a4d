r"""Plays a schedule: when each action starts, from the seconds of actions and messages.

    stage 0   F0 F1 F2 F3 ....B3 R2 B2 ...      an action starts when the stage is free and its message has arrived;
                \                               a message leaves when its sender is done, its receive is posted and
    stage 1   ....F0 F1 F2 F3 B3 R2 B2 ...      the link is free, occupies it while it is transferred, arrives later

Receives are posted as ``flow_control`` says, and the sender learns of one a latency later. ``validate`` plays each
schedule in equal units of time with instant messages, ``suite.pipeline.planning.simulate`` with costs and links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.schedule.action import Action, virtual_stages_of
from suite.pipeline.schedule.flow_control import GLOO, FlowControl
from suite.pipeline.schedule.timeline import Span


@dataclass(frozen=True, slots=True)
class Route:
    """The messages between two cells, activations forward and gradients backward; in seconds.

    A message occupies the route for ``forward_s`` or ``backward_s`` and arrives ``latency_s`` later.
    """

    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0


class Playback:
    """A played schedule: each action as early as possible, until all are done or wait forever.

    ``rows``
        spans of each stage;
    ``stuck``
        by stage, the action at which it waits forever;
    ``full``
        stages of ``stuck`` that wait because too many of their sends are in flight.
    """

    def __init__(
        self,
        schedule: Sequence[Sequence[Action]],
        seconds: Callable[[int, Action], float],
        routes: Sequence[Route],
        flow: FlowControl = GLOO,
        limits_sends: bool = False,
        cell_to_stage: tuple[int, ...] = (),
    ) -> None:
        """``seconds(stage, action)`` is the duration of an action. With ``limits_sends`` a stage also waits while more
        messages of its last cell than ``flow`` allows have no posted receive; the metadata, which goes first, counts
        too. ``cell_to_stage`` as in ``CellPlacement``."""
        self._schedule, self._placement, self._seconds = schedule, CellPlacement(len(schedule), cell_to_stage), seconds
        local_cells = range(virtual_stages_of(schedule))
        self._cells = [[self._placement.cell_of(v, k) for v in local_cells] for k in range(len(schedule))]
        self._outputs, self._inputs = _message_queues(schedule, self._placement, routes, flow)
        self._max_inflight_sends = flow.max_inflight_sends if limits_sends else None
        self._sent = {
            route.source: [(self._outputs[1, route.source][0], _METADATA)]
            for route in routes
            if self._placement.crosses(route.source, route.target)
        }
        # cells whose stage has reached their first action
        self._started = {self._placement.cell_of(0, k) for k in range(len(schedule))}
        self.rows: list[list[Span]] = [[] for _ in schedule]
        self._play(routes)
        self.stuck = {
            k: actions[len(row)]
            for k, (actions, row) in enumerate(zip(schedule, self.rows, strict=True))
            if len(row) < len(actions)
        }
        self.full = [k for k in self.stuck if self._sends_are_full(k)]

    def _play(self, routes: Sequence[Route]) -> None:
        partners: list[set[int]] = [set() for _ in self._schedule]
        for route in routes:
            ends = self._placement.stage_of(route.source), self._placement.stage_of(route.target)
            partners[ends[0]].add(ends[1])
            partners[ends[1]].add(ends[0])
        runnable = list(range(len(self._schedule)))
        while runnable:
            k = runnable.pop()
            begun = len(self.rows[k])
            while len(self.rows[k]) < len(self._schedule[k]) and self._act(k):
                pass
            if len(self.rows[k]) > begun:  # they may wait for what it sent or received
                runnable += partners[k] - {k}

    def _act(self, k: int) -> bool:
        """Plays the next action of a stage; returns False if it must wait."""
        row = self.rows[k]
        action = self._schedule[k][len(row)]
        i, cell = action.micro_batch, self._cells[k][action.virtual_stage]
        self._started.add(cell)
        if self._sends_are_full(k):
            return False
        incoming = self._inputs.get((action.direction, cell), ())
        start = row[-1].end if row else 0.0
        for queue in incoming:
            queue.post(1, start)
        for queue in incoming:
            if i not in queue.arrived:
                return False
            start = max(start, queue.arrived[i])
        end = start + self._seconds(k, action)
        row.append(Span(action.kind, i, start, end, action.virtual_stage))
        for queue in incoming:
            queue.recv(start)
        for queue in self._outputs.get((action.direction, cell), ()):
            if self._placement.crosses(cell, queue.target):
                self._sent.setdefault(cell, []).append((queue, queue.sent))
            queue.send(i, end)
        return True

    def _sends_are_full(self, k: int) -> bool:
        """Returns whether a stage must wait after its last send: the oldest in flight has no posted receive.

        The first receives of a cell are posted when its stage reaches its first action.
        """
        row = self.rows[k]
        if self._max_inflight_sends is None or not row:
            return False
        last = self._schedule[k][len(row) - 1]
        sent = self._sent.get(self._cells[k][last.virtual_stage], ())
        if not last.direction or len(sent) <= self._max_inflight_sends:
            return False
        queue, number = sent[-1 - self._max_inflight_sends]
        return number >= queue.posted or queue.target not in self._started


_METADATA = -1
"""The number of a cell's metadata among its messages to the next cell."""


class _MessageQueue:
    """One direction of a route; the target receives its messages in ``order``."""

    def __init__(self, target: int, transfer_s: float, latency_s: float, order: Sequence[int], ahead: int) -> None:
        """``ahead`` receives are posted before they are used."""
        self.target, self._transfer_s, self._latency_s = target, transfer_s, latency_s
        self._order, self._ahead = order, ahead
        self.arrived: dict[int, float] = {}
        """The time at which each message arrives."""
        self.sent = self._received = 0
        self._posted = dict.fromkeys(order[:ahead], 0.0)  # when the sender learns of the receive
        self._ready: dict[int, float] = {}
        self._free = 0.0

    @property
    def posted(self) -> int:
        """How many receives have been posted."""
        return len(self._posted)

    def send(self, i: int, end: float) -> None:
        """The sender has computed message i."""
        self.sent += 1
        self._ready[i] = end
        self._transfer_if_ready(i)

    def recv(self, start: float) -> None:
        """The target receives the next message in its order, and posts another receive."""
        self._received += 1
        self.post(self._ahead, start)

    def post(self, count: int, at: float) -> None:
        """The target posts receives until ``count`` are ahead of those that it has used."""
        for i in self._order[self.posted : self._received + count]:
            self._posted[i] = at + self._latency_s
            self._transfer_if_ready(i)

    def _transfer_if_ready(self, i: int) -> None:
        if i in self._ready and i in self._posted:
            self._free = max(self._free, self._ready[i], self._posted[i]) + self._transfer_s
            self.arrived[i] = self._free + self._latency_s


def message_orders(schedule: Sequence[Sequence[Action]], placement: CellPlacement) -> dict[tuple[int, int], list[int]]:
    """Returns the micro-batches of all actions in order, by their direction and cell."""
    orders: dict[tuple[int, int], list[int]] = {}
    local_cells = range(virtual_stages_of(schedule))
    for k, actions in enumerate(schedule):
        cells = [placement.cell_of(virtual_stage, k) for virtual_stage in local_cells]
        for action in actions:
            orders.setdefault((action.direction, cells[action.virtual_stage]), []).append(action.micro_batch)
    return orders


_Queues = dict[tuple[int, int], list[_MessageQueue]]


def _message_queues(
    schedule: Sequence[Sequence[Action]], placement: CellPlacement, routes: Sequence[Route], flow: FlowControl
) -> tuple[_Queues, _Queues]:
    """Returns by direction and cell the queues of outgoing messages, and those of incoming ones. What goes from one
    cell of a stage to another stays there: it takes no time and waits for no receive."""
    orders = message_orders(schedule, placement)
    outputs: _Queues = {}
    inputs: _Queues = {}
    for route in routes:
        ends = (1, route.source, route.target, route.forward_s), (-1, route.target, route.source, route.backward_s)
        for direction, source, target, transfer_s in ends:
            order, ahead = orders.get((direction, target), ()), flow.recvs_ahead(direction)
            queue = (
                _MessageQueue(target, transfer_s, route.latency_s, order, ahead)
                if placement.crosses(source, target)
                else _MessageQueue(target, 0.0, 0.0, order, len(order))
            )
            outputs.setdefault((direction, source), []).append(queue)
            inputs.setdefault((direction, target), []).append(queue)
    return outputs, inputs
