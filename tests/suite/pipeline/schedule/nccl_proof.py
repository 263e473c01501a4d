"""Proves that a schedule cannot stop on NCCL, or names the circle of waits in which it does: the oracle of ``play``.

    stage 0   compute   [F0 ][F1 ]............[B0 ]    waits for the messages that it uses
              send a         [a0 ....][a1 .]           a message holds its stream, on both sides, from the moment that
              recv g                       [g0 ]       its rank reaches it until both have
    stage 1   recv a    [a0 .........][a1 .]
              compute                 [F0 ][B0 ]

The host launches all of this in order and runs ahead; it waits for a cell's metadata alone. A rank reaches a message
when the operations before it in its stream, and the computations launched before it, are done; the transfer starts once
both ranks have reached it. What is posted when is read from ``flow_control``. Each wait has one fixed set of causes, so
a step deadlocks if and only if the graph of waits has a cycle.

A rule of CUDA can be added. The first launch of a kernel that is loaded lazily waits until the whole device is idle
(CUDA C++ Programming Guide, "Lazy Loading"), so the executor launches each kernel once before it posts the first
receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import CellPair
from suite.pipeline.schedule.action import Action, virtual_stages_of
from suite.pipeline.schedule.flow_control import FlowControl, flow_control

IdleWaits = Literal["never", "first launch", "every launch"]
"""Which actions wait until the device is idle: the first of each kind in each cell, whose kernels are loaded lazily; or
every one, as after a failed allocation."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of a circle: the stage, and what waits there."""

    stage: int
    what: str

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.what}"


@dataclass(frozen=True)
class Rules:
    """What holds on all devices."""

    flow: FlowControl
    idle_waits: IdleWaits = "never"
    warms_up: bool = False
    """Each kind of action is launched once before the first receive is posted."""


def launched(
    schedule: Sequence[Sequence[Action]],
    flow: FlowControl | None = None,
    pairs: Collection[CellPair] = (),
    cell_to_stage: tuple[int, ...] = (),
    **others: object,
) -> Waits:
    """Returns the waits of a step, those of each stage in the order in which its host launches them.

    ``schedule`` has passed the other checks of ``suite.pipeline.schedule.validate``. ``flow`` is that of NCCL if not
    given, ``others`` are those of ``Rules``. ``pairs`` are the cells that exchange messages, only neighbours if empty;
    ``cell_to_stage`` as in ``CellPlacement``.
    """
    rules = Rules(flow or flow_control("nccl", len(schedule), virtual_stages_of(schedule)), **others)
    placement, waits = CellPlacement(len(schedule), cell_to_stage), Waits()
    neighbours = pairwise(range(len(schedule) * virtual_stages_of(schedule)))
    between = sorted({(a, b) for a, b in pairs or neighbours if placement.crosses(a, b)})
    for k, actions in enumerate(schedule):
        launches = StageLaunches(waits, k, placement, actions, between, rules)
        for action in actions:
            launches.add(action)
    return waits


def with_neighbours(pairs: Iterable[CellPair], count: int) -> set[CellPair]:
    """Returns the pairs of ``count`` cells, and all of neighbours."""
    return {*pairwise(range(count)), *((a, b) for a, b in pairs if a < b < count)}


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


class StageLaunches:
    """What the host of a stage launches in a mini-batch, in the order of ``suite.pipeline.runtime.executor``."""

    def __init__(
        self,
        waits: Waits,
        stage: int,
        placement: CellPlacement,
        actions: Sequence[Action],
        pairs: Sequence[CellPair],
        rules: Rules,
    ) -> None:
        self._waits, self._stage, self._placement, self._actions = waits, stage, placement, actions
        self._pairs, self._rules, self._flow = pairs, rules, rules.flow
        self._known = 0
        """How many cells have their metadata."""
        self._begun: set[int] = set()
        """The cells that have posted their first receives."""
        self._host: list[int] = []
        """The host's last wait: all later launches come after it."""
        self._before_compute: list[int] = []
        """What the next computation waits for: the one before, and messages."""
        self._stream_ends: dict[object, list[int]] = {}
        """The last operation of each stream."""
        self._unposted: dict[CellPair, deque[int]] = {}
        """The micro-batches to receive, by source and target."""
        self._posted: dict[CellPair, deque[int]] = {}
        """Receives that no computation waits for yet."""
        self._in_flight: dict[CellPair, deque[tuple[int, bool]]] = {}
        """Sends that nothing waits for yet, and whether the host will, by cell and distance."""
        self._launched: set[tuple[str, int]] = set()
        """Kinds of actions by virtual stage."""
        if rules.warms_up:
            self._warm_up()

    def _warm_up(self) -> None:
        """Exchanges the metadata of all cells, and launches each kind of action of each cell once."""
        self._exchange_metadata(virtual_stages_of([self._actions]))
        for kind, virtual_stage in dict.fromkeys((a.kind, a.virtual_stage) for a in self._actions):
            self._compute(Action(kind, 0, virtual_stage))

    def add(self, action: Action) -> None:
        """Launches an action, with its messages."""
        cell = action.cell(self._stage, self._placement)
        if cell not in self._begun:
            self._begun.add(cell)
            self._exchange_metadata(action.virtual_stage + 1)
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

    def _exchange_metadata(self, count: int) -> None:
        """Waits for the metadata of the stage's first ``count`` cells, and sends on that of the cells behind them."""
        for virtual_stage in range(self._known, count):
            cell = self._placement.cell_of(virtual_stage, self._stage)
            if (cell - 1, cell) in self._pairs:
                name = Wait(self._stage, f"the metadata from stage {self._placement.stage_of(cell - 1)}")
                self._host = [self._waits.add_message(name, self._host, (cell - 1, cell, _METADATA), sends=False)]
            if (cell, cell + 1) in self._pairs:
                name = Wait(self._stage, f"the metadata to stage {self._placement.stage_of(cell + 1)}")
                end = self._waits.add_message(name, self._host, (cell, cell + 1, _METADATA), sends=True)
                self._in_flight.setdefault((cell, 0), deque()).append((end, True))
        self._known = max(self._known, count)

    def _post_first(self, virtual_stage: int, cell: int) -> None:
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
                name = Wait(self._stage, "too many messages are in flight")
                self._host = [self._waits.add(name, [*self._host, *self._before_compute, oldest])]
            else:
                self._before_compute.append(oldest)

    def _message(self, source: int, target: int, micro_batch: int, sends: bool) -> int:
        peer = self._placement.stage_of(target if sends else source)
        kind = "activations" if source < target else "gradients"
        what = f"the {'send' if sends else 'receive'} of {kind} {micro_batch} {'to' if sends else 'from'} stage {peer}"
        stream = min(source, target), max(source, target), kind
        message = source, target, micro_batch
        end = self._waits.add_message(Wait(self._stage, what), self._before(stream), message, sends)
        self._stream_ends[stream] = [end]
        return end

    def _compute(self, action: Action) -> None:
        launch, waits = (action.kind, action.virtual_stage), self._rules.idle_waits
        if waits == "every launch" or (waits == "first launch" and launch not in self._launched):
            name = Wait(self._stage, f"{action} waits until the device is idle")
            ends = [end for ends in self._stream_ends.values() for end in ends]
            self._host = [self._waits.add(name, [*self._host, *self._before_compute, *ends])]
        self._launched.add(launch)
        end = self._waits.add(Wait(self._stage, str(action)), self._before(_COMPUTE))
        self._stream_ends[_COMPUTE] = [end]
        self._before_compute = [end]

    def _before(self, stream: object) -> list[int]:
        """Returns what comes before the next operation of a stream."""
        return [*self._host, *self._before_compute, *self._stream_ends.get(stream, [])]
