r"""Plays a step: when each stage runs which action, from the seconds of actions and messages.

    stage 0   F0 F1 F2 F3 ....B3 R2 B2 ...      an action starts when the stage is free and its message has arrived;
                \                               a message leaves when its sender is done, its receive is posted and
    stage 1   ....F0 F1 F2 F3 B3 R2 B2 ...      the link is free, occupies it while it is transferred, arrives later

All that asks when a stage does something asks here: a plan for the time of its step, a policy for its next action
(``policies``), interleaved, zero-bubble and V schedules for their order in units of time (``schedules``), ``validate``
for a deadlock. What is posted when, and how many messages may be in flight, is in ``flow_control``, which the executor
reads too. Receives are posted ahead of use, and the sender learns of one a latency later. A stage with too many
messages in flight waits until the oldest is transferred. Which actions wait forever does not depend on the seconds:
what an action waits for is fixed, and they only say how long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.schedule.action import EFFECTS, Action, Schedule, of_kind, virtual_stages_of
from suite.pipeline.schedule.flow_control import GLOO, FlowControl
from suite.pipeline.schedule.timeline import Span

Seconds = Mapping[str, Sequence[float]]
"""The seconds of each kind of action by cell; ``f`` is a forward without a graph, because it is recomputed."""


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


class _Queue:
    """The messages of one direction of a route, in the order in which they are sent and received."""

    def __init__(self, source: int, target: int, transfer_s: float, latency_s: float, ahead: int) -> None:
        """``ahead`` receives are posted before they are used."""
        self.source, self.target, self.ahead = source, target, ahead
        self._transfer_s, self.latency_s = transfer_s, latency_s
        self.ready: list[float] = []
        """When each was sent."""
        self.posted = [0.0] * ahead
        """When the sender learns of each receive."""
        self.arrived: list[float] = []
        self.received = 0
        self._free = 0.0

    def send(self, at: float) -> None:
        """Sends the next message."""
        self.ready.append(at)
        self._transfer()

    def post(self, count: int, at: float) -> None:
        """Posts receives until ``count`` are ahead of those that are used."""
        missing = self.received + count - len(self.posted)
        if missing > 0:
            self.posted += [at + self.latency_s] * missing
            self._transfer()

    def _transfer(self) -> None:
        """Transfers what is sent and has a receive."""
        for number in range(len(self.arrived), min(len(self.ready), len(self.posted))):
            self._free = max(self._free, self.ready[number], self.posted[number]) + self._transfer_s
            self.arrived.append(self._free + self.latency_s)

    def arrival(self, number: int, at: float) -> float | None:
        """Returns when a message, the next or one that arrived, arrives, if its receive is posted at a time or was
        before; None if it is not sent yet."""
        if number < len(self.arrived):
            return self.arrived[number]
        if number >= len(self.ready):
            return None
        return max(self._free, self.ready[number], at + self.latency_s) + self._transfer_s + self.latency_s


class _LocalQueue(_Queue):
    """What one cell of a stage passes to another: it takes no time, and waits for no receive."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(source, target, 0.0, 0.0, 0)

    def send(self, at: float) -> None:
        self.arrived.append(at)

    def post(self, count: int, at: float) -> None:
        pass


class Play:
    """A step that is played, action by action.

    ``rows``
        the spans of each stage;
    ``free``
        when each stage has done its own;
    ``done``
        how many forwards, 1, and backwards, -1, each cell has done.
    """

    def __init__(
        self, placement: CellPlacement, cells: int, seconds: Seconds, routes: Sequence[Route], flow: FlowControl = GLOO
    ) -> None:
        self.placement, self._seconds, self._flow = placement, seconds, flow
        self.cell_to_stage = [placement.stage_of(cell) for cell in range(cells)]
        self.virtual_stage = [placement.virtual_stage_of(cell) for cell in range(cells)]
        self.rows: list[list[Span]] = [[] for _ in range(placement.stages)]
        self.free = [0.0] * placement.stages
        self.done = {direction: [0] * cells for direction in (1, 0, -1)}
        self._inputs: dict[int, list[list[_Queue]]] = {way: [[] for _ in range(cells)] for way in (1, 0, -1)}
        self._outputs: dict[int, list[list[_Queue]]] = {way: [[] for _ in range(cells)] for way in (1, 0, -1)}
        self._in_flight: dict[tuple[int, int], deque[tuple[_Queue, int]]] = {}
        """The last messages of each cell: to its neighbours together, and to each cell further away."""
        self._started = {placement.cell_of(0, stage) for stage in range(placement.stages)}
        """Cells whose stage has come to their first action."""
        self._open = 0
        """So many cells have got their metadata, which each sends on to the next, and have posted their first
        receives."""
        self._open_cells()
        self._full: dict[int, tuple[_Queue, int, Sequence[_Queue]]] = {}
        """By stage, the message that must be transferred before the stage goes on, and the queues of what it has yet to
        send of its last action."""
        self._events = [(0.0, stage) for stage in range(placement.stages)]
        for route in sorted(routes, key=lambda route: (route.source, route.target)):  # peers of a cell go in order
            self._add(1, route.source, route.target, route.forward_s, route.latency_s)
            self._add(-1, route.target, route.source, route.backward_s, route.latency_s)

    def _add(self, direction: int, source: int, target: int, transfer_s: float, latency_s: float) -> None:
        crosses = self.placement.crosses(source, target)
        ahead = self._flow.recvs_ahead(direction)
        queue = _Queue(source, target, transfer_s, latency_s, ahead) if crosses else _LocalQueue(source, target)
        if crosses and target == source + 1:  # the metadata goes first
            self._in_flight[source, _NEIGHBOURS] = deque([(queue, _METADATA)])
        self._outputs[direction][source].append(queue)
        self._inputs[direction][target].append(queue)

    def play(self, choose: Callable[[int, float], tuple[str, int, int, float] | float | None]) -> None:
        """Plays until no stage can go on. ``choose(stage, time)`` returns what a free stage does next: kind, cell,
        micro-batch and start of an action that the stage has come to (``come_to``); a later time at which it is asked
        again; or None to wait for a message."""
        while self._events:
            now, stage = heappop(self._events)
            if now < self.free[stage] or self._waits_for_send(stage):
                continue
            chosen = choose(stage, max(now, self.free[stage]))
            if isinstance(chosen, tuple):
                self._run(stage, *chosen)
            elif chosen is not None:
                heappush(self._events, (chosen, stage))

    def stop(self) -> None:
        """Ends the play."""
        self._events.clear()

    def start_of(self, direction: int, cell: int, free: float) -> float | None:
        """Returns when a cell's next action with messages of a direction can start on a stage that is free; None if it
        waits for a message that is not sent yet."""
        start, number = free, self.done[direction][cell]
        for queue in self._inputs[direction][cell]:
            arrival = queue.arrival(number, start)
            if arrival is None:
                return None
            if arrival > start:
                start = arrival
        return start

    def come_to(self, direction: int, cell: int, at: float) -> None:
        """Receives the messages of an action that a stage has come to, one after the other, until one has not arrived:
        the receive of the next is not posted before."""
        if cell not in self._started:
            self._started.add(cell)
            self._open_cells()
        number = self.done[direction][cell]
        for queue in self._inputs[direction][cell]:
            if queue.received == number:
                queue.post(1, at)
                if number >= len(queue.arrived):
                    break
                queue.received += 1
                queue.post(queue.ahead, max(at, queue.arrived[number]))
            at = max(at, queue.arrived[number])
        if self._full:
            self._wake_senders(at)

    def _open_cells(self) -> None:
        while self._open in self._started:
            self._open += 1

    def _run(self, stage: int, kind: str, cell: int, micro_batch: int, start: float) -> None:
        direction = DIRECTIONS[kind]
        self.free[stage] = end = start + self._seconds[kind][cell]
        self.done[direction][cell] += 1
        self.rows[stage].append(Span(kind.upper(), micro_batch, start, end, self.virtual_stage[cell]))  # type: ignore[arg-type]
        self._send(stage, self._outputs[direction][cell])
        heappush(self._events, (self.free[stage], stage))

    def _send(self, stage: int, queues: Sequence[_Queue]) -> None:
        """Sends a message of each queue, one after the other; with too many in flight the stage waits for the oldest
        before it sends the next."""
        for number, queue in enumerate(queues, 1):
            queue.send(self.free[stage])
            target = self.cell_to_stage[queue.target]
            heappush(self._events, (self.free[stage], target))
            if target == stage:
                continue
            distance = abs(queue.target - queue.source)
            key = queue.source, _NEIGHBOURS if distance == 1 else queue.target
            sends = self._in_flight.setdefault(key, deque())
            sends.append((queue, len(queue.ready) - 1))
            if len(sends) > self._flow.max_sends_to(distance):
                self._full[stage] = *sends.popleft(), queues[number:]
                self._waits_for_send(stage)
                return

    def _waits_for_send(self, stage: int) -> bool:
        """Whether a stage waits until a message is transferred; if it no longer does, it was free from then on, and
        sends what is left of its action."""
        if stage not in self._full:
            return False
        queue, number, left = self._full[stage]
        if queue.target >= self._open or number >= len(queue.posted):
            return True
        if number != _METADATA:
            self.free[stage] = max(self.free[stage], queue.arrived[number] - queue.latency_s)
        del self._full[stage]
        self._send(stage, left)
        return stage in self._full

    def _wake_senders(self, at: float) -> None:
        for stage in list(self._full):
            if not self._waits_for_send(stage):
                heappush(self._events, (max(at, self.free[stage]), stage))

    def schedule(self) -> Schedule:
        """Returns the actions of each stage."""
        return [[Action(span.kind, span.micro_batch, span.virtual_stage) for span in row] for row in self.rows]  # type: ignore[arg-type]

    @property
    def full(self) -> list[int]:
        """The stages that wait because too many of their sends are in flight."""
        return sorted(self._full)


_NEIGHBOURS = -1
"""Stands for both neighbours of a cell."""

_METADATA = -1
"""The number of a cell's metadata among its messages."""

DIRECTIONS = {kind: effect.direction for kind, effect in EFFECTS.items()} | {"f": 1}  # f: F before an R


@dataclass(frozen=True)
class Played:
    """A schedule that was played."""

    rows: list[list[Span]]
    """The spans of each stage."""
    stuck: dict[int, Action]
    """By stage, the action at which it waits forever."""
    full: list[int]
    """Stages of ``stuck`` that wait because too many of their sends are in flight."""


def play(
    schedule: Sequence[Sequence[Action]],
    seconds: Seconds,
    routes: Sequence[Route],
    flow: FlowControl = GLOO,
    cell_to_stage: tuple[int, ...] = (),
) -> Played:
    """Plays a schedule, each action as early as possible; ``cell_to_stage`` as in ``CellPlacement``."""
    placement = CellPlacement(len(schedule), cell_to_stage)
    virtual_stages = virtual_stages_of(schedule)
    cells = [[placement.cell_of(v, k) for v in range(virtual_stages)] for k in range(len(schedule))]
    dropped = [of_kind(actions, "R") for actions in schedule]
    player = Play(placement, len(schedule) * virtual_stages, seconds, routes, flow)

    def choose(k: int, now: float) -> tuple[str, int, int, float] | None:
        done = len(player.rows[k])
        if done == len(schedule[k]):
            return None
        action = schedule[k][done]
        cell = cells[k][action.virtual_stage]
        player.come_to(action.direction, cell, player.free[k])
        start = player.start_of(action.direction, cell, player.free[k])
        if start is None:
            return None
        is_dropped = action.kind == "F" and (action.virtual_stage, action.micro_batch) in dropped[k]
        return "f" if is_dropped else action.kind, cell, action.micro_batch, start

    player.play(choose)
    stuck = {
        k: actions[len(player.rows[k])] for k, actions in enumerate(schedule) if len(player.rows[k]) < len(actions)
    }
    return Played(player.rows, stuck, [k for k in player.full if k in stuck])
