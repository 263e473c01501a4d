"""Proves that a schedule cannot stop on NCCL, or names the circle of waits in which it does.

    stage 0   compute   [F0 ][F1 ]............[B0 ]    waits for the messages that it uses
              send a         [a0 ....][a1 .]           a message holds its stream, on both sides, from the moment that
              recv g                       [g0 ]       its rank reaches it until both have
    stage 1   recv a    [a0 .........][a1 .]
              compute                 [F0 ][B0 ]

The host launches all of this in order and runs ahead; it waits for a cell's metadata alone. A rank reaches a message
when the operations before it in its stream, and the computations launched before it, are done; the transfer starts once
both ranks have reached it. What is posted when is read from ``flow_control``. Each wait has one fixed set of causes, so
a step deadlocks if and only if the graph of waits has a cycle.

Two rules of CUDA can be added. A launch may wait until the whole device is idle: that of a kernel that is loaded lazily
(CUDA C++ Programming Guide, "Lazy Loading"), or any, after a failed allocation. And a device may have few hardware
queues (CUDA_DEVICE_MAX_CONNECTIONS), each of which handles the operations of its streams one by one, as launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import CellPair
from suite.pipeline.schedule.action import Action, virtual_stages_of
from suite.pipeline.schedule.flow_control import FlowControl, flow_control

IdleWaits = Literal["never", "first launch", "every launch"]
"""Which actions wait until the device is idle; "first launch": the first of each kind in each cell."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of a circle: the stage, and what waits there."""

    stage: int
    what: str

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.what}"


def launched(
    schedule: Sequence[Sequence[Action]],
    pairs: Iterable[CellPair] | None = None,
    flow: FlowControl | None = None,
    idle_waits: IdleWaits = "never",
    warms_up: bool = False,
    queues: int | None = None,
    owners: tuple[int, ...] = (),
) -> Waits:
    """Returns the waits of a step, those of each stage in the order in which its host launches them.

    ``schedule`` has passed the other checks of ``suite.pipeline.schedule.validate``. ``pairs`` are the cells that
    exchange messages, by default neighbours; ``flow`` is by default that of NCCL. With ``warms_up`` each kind of action
    is launched once before the first receive is posted. Without ``queues`` all streams make progress independently.
    ``owners`` are those of the cells, as ``CellPlacement`` has them.
    """
    stages, virtual_stages, placement = len(schedule), virtual_stages_of(schedule), CellPlacement(len(schedule), owners)
    neighbours = ((cell, cell + 1) for cell in range(stages * virtual_stages - 1))
    between = {(a, b) for a, b in (neighbours if pairs is None else pairs) if placement.crosses(a, b)}
    waits = Waits()
    for k, actions in enumerate(schedule):
        own_flow = flow or flow_control("nccl", stages, virtual_stages)
        launches = _StageLaunches(waits, k, placement, actions, between, own_flow, idle_waits, queues)
        if warms_up:
            launches.warm_up()
        for action in actions:
            launches.add(action)
    return waits


_METADATA = -1
"""The micro-batch of a message with metadata."""

_COMPUTE = "compute"
"""The stream of all computations."""

_Message = tuple[int, int, int]
"""Source cell, target cell, micro-batch."""


@dataclass
class Waits:
    """What waits for what, by number."""

    names: list[Wait] = field(default_factory=list)
    causes: list[list[int]] = field(default_factory=list)
    """``causes[n]`` all come before n."""
    _sides: dict[tuple[_Message, bool], tuple[int, int]] = field(default_factory=dict)

    def add(self, name: Wait, causes: Iterable[int]) -> int:
        """Adds a wait; returns its number."""
        self.names.append(name)
        self.causes.append(list(causes))
        return len(self.names) - 1

    def add_message(self, name: Wait, causes: Iterable[int], message: _Message, sends: bool) -> int:
        """Adds one side of a message: it comes to it after ``causes``, and ends when the other side has come too."""
        begin = self.add(name, causes)
        end = self.add(name, [begin])
        self._sides[message, sends] = begin, end
        if other := self._sides.get((message, not sends)):
            self.causes[end].append(other[0])
            self.causes[other[1]].append(begin)
        return end

    def circle(self) -> list[Wait]:
        """Returns waits of which each waits for the next one, and the last for the first; empty if the step ends."""
        missing = [len(causes) for causes in self.causes]
        effects: list[list[int]] = [[] for _ in self.causes]
        for effect, causes in enumerate(self.causes):
            for cause in causes:
                effects[cause].append(effect)
        ended = deque(at for at, count in enumerate(missing) if not count)
        while ended:
            for effect in effects[ended.popleft()]:
                missing[effect] -= 1
                if not missing[effect]:
                    ended.append(effect)
        number: int | None = next((at for at, count in enumerate(missing) if count), None)
        path: dict[int, int] = {}
        while number is not None and number not in path:
            path[number] = len(path)
            number = next(cause for cause in reversed(self.causes[number]) if missing[cause])
        if number is None:
            return []
        circle = [self.names[at] for at in list(path)[path[number] :]]
        return [name for at, name in enumerate(circle) if name != circle[at - 1]]  # a message's side counts once


class _StageLaunches:
    """What the host of a stage launches in a mini-batch, in the order of ``suite.pipeline.runtime.executor``."""

    def __init__(
        self,
        waits: Waits,
        stage: int,
        placement: CellPlacement,
        actions: Sequence[Action],
        pairs: Collection[CellPair],
        flow: FlowControl,
        idle_waits: IdleWaits,
        queues: int | None,
    ) -> None:
        self._waits, self._stage, self._placement, self._actions = waits, stage, placement, actions
        self._pairs, self._flow, self._idle_waits, self._queues = sorted(pairs), flow, idle_waits, queues
        count = 1 + max((action.virtual_stage for action in actions), default=0)
        self._cells = [placement.cell_of(v, stage) for v in range(count)]
        self._with_metadata = 0
        """How many cells have their metadata."""
        self._host: list[int] = []
        """The host's last wait: all later launches come after it."""
        self._before_compute: list[int] = []
        """What the next computation waits for: the one before, and messages."""
        self._stream_ends: dict[object, int] = {}
        """The last operation of each stream."""
        self._stream_numbers: dict[object, int] = {}
        self._queue_ends: dict[int | None, int] = {}
        self._unposted: dict[CellPair, deque[int]] = {}
        """The micro-batches to receive, by source and target."""
        self._posted: dict[CellPair, deque[int]] = {}
        """Receives that no computation waits for yet."""
        self._in_flight: dict[CellPair, deque[tuple[int, bool]]] = {}
        """Sends that nothing waits for yet, and whether the host will, by cell and distance."""
        self._launched: set[tuple[str, int]] = set()
        self._started: set[int] = set()

    def warm_up(self) -> None:
        """Exchanges the metadata of all cells, and launches each kind of action of each cell once."""
        for _ in self._cells:
            self._exchange_metadata()
        for kind, virtual_stage in dict.fromkeys((a.kind, a.virtual_stage) for a in self._actions):
            self._compute(Action(kind, 0, virtual_stage))

    def add(self, action: Action) -> None:
        """Launches an action, with its messages."""
        cell = action.cell(self._stage, self._placement)
        if action.virtual_stage == self._with_metadata:
            self._exchange_metadata()
        if cell not in self._started:
            self._post_first(action.virtual_stage, cell)
        for peer in self._peers(cell, -action.direction):
            self._recv(peer, cell)
        self._compute(action)
        for peer in self._peers(cell, action.direction):
            self._send(cell, peer, action.micro_batch)

    def _peers(self, cell: int, direction: int) -> list[int]:
        """Returns the cells behind (1) or before (-1) a cell that it exchanges messages with; none for 0."""
        ends = [pair if direction > 0 else pair[::-1] for pair in self._pairs] if direction else []
        return [end for begin, end in ends if begin == cell]

    def _exchange_metadata(self) -> None:
        """Waits for the metadata of the next cell, and sends on that of the cell behind it."""
        cell = self._cells[self._with_metadata]
        self._with_metadata += 1
        if (cell - 1, cell) in self._pairs:
            name = Wait(self._stage, f"the metadata from stage {self._placement.stage_of(cell - 1)}")
            self._host = [self._waits.add_message(name, self._host, (cell - 1, cell, _METADATA), sends=False)]
        if (cell, cell + 1) in self._pairs:
            name = Wait(self._stage, f"the metadata to stage {self._placement.stage_of(cell + 1)}")
            end = self._waits.add_message(name, self._host, (cell, cell + 1, _METADATA), sends=True)
            self._in_flight.setdefault((cell, 0), deque()).append((end, True))

    def _post_first(self, virtual_stage: int, cell: int) -> None:
        self._started.add(cell)
        for direction in (-1, 1):
            own = [a for a in self._actions if a.virtual_stage == virtual_stage and a.direction == direction]
            for peer in self._peers(cell, -direction):
                self._unposted[peer, cell] = deque(action.micro_batch for action in own)
                self._posted[peer, cell] = deque()
                self._post(peer, cell, self._flow.recvs_ahead(direction))

    def _post(self, source: int, target: int, count: int) -> None:
        """Posts receives until ``count`` are ahead."""
        unposted, posted = self._unposted[source, target], self._posted[source, target]
        while unposted and len(posted) < count:
            posted.append(self._message(source, target, unposted.popleft(), sends=False))

    def _recv(self, source: int, target: int) -> None:
        self._post(source, target, 1)
        self._before_compute.append(self._posted[source, target].popleft())
        self._post(source, target, self._flow.recvs_ahead(target - source))

    def _send(self, source: int, target: int, micro_batch: int) -> None:
        """Sends a message; waits for the oldest if too many are in flight."""
        distance = abs(target - source)
        in_flight = self._in_flight.setdefault((source, 0 if distance == 1 else target - source), deque())
        in_flight.append((self._message(source, target, micro_batch, sends=True), False))
        while len(in_flight) > self._flow.max_sends_to(distance):
            oldest, is_on_host = in_flight.popleft()
            if is_on_host:
                self._wait_on_host("too many messages are in flight", [oldest])
            else:
                self._before_compute.append(oldest)

    def _message(self, source: int, target: int, micro_batch: int, sends: bool) -> int:
        peer = self._placement.stage_of(target if sends else source)
        kind = "activations" if source < target else "gradients"
        what = f"the {'send' if sends else 'receive'} of {kind} {micro_batch} {'to' if sends else 'from'} stage {peer}"
        stream = min(source, target), max(source, target), kind
        message = source, target, micro_batch
        end = self._waits.add_message(Wait(self._stage, what), self._before(stream), message, sends)
        self._launched_on(stream, end)
        return end

    def _compute(self, action: Action) -> None:
        launch = action.kind, action.virtual_stage
        if self._idle_waits == "every launch" or (self._idle_waits == "first launch" and launch not in self._launched):
            self._wait_on_host(f"{action} waits until the device is idle", self._stream_ends.values())
        self._launched.add(launch)
        end = self._waits.add(Wait(self._stage, str(action)), self._before(_COMPUTE))
        self._launched_on(_COMPUTE, end)
        self._before_compute = [end]

    def _wait_on_host(self, what: str, causes: Iterable[int]) -> None:
        name = Wait(self._stage, what)
        self._host = [self._waits.add(name, [*self._host, *self._before_compute, *causes])]

    def _queue(self, stream: object) -> int | None:
        number = self._stream_numbers.setdefault(stream, len(self._stream_numbers))
        return None if self._queues is None else number % self._queues

    def _before(self, stream: object) -> list[int]:
        """Returns what comes before the next operation of a stream."""
        ends = self._stream_ends.get(stream), self._queue_ends.get(self._queue(stream))
        return [*self._host, *self._before_compute, *(end for end in ends if end is not None)]

    def _launched_on(self, stream: object, end: int) -> None:
        self._stream_ends[stream] = end
        if (queue := self._queue(stream)) is not None:
            self._queue_ends[queue] = end
