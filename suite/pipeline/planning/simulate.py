r"""Simulates a schedule with given costs and links: when each stage does what, and how long a step takes.

    stage 0   F0 F1 F2 F3 ....B3 R2 B2 ...      an action starts when the stage is free and its message has arrived;
                \                               a message leaves when its sender is done, its receive is posted and
    stage 1   ....F0 F1 F2 F3 B3 R2 B2 ...      the link is free, occupies it bytes / bandwidth, arrives latency later

Receives are posted as in ``suite.pipeline.runtime.p2p``, ``PREPOSTED_RECVS`` messages ahead, and the sender learns of
one a latency later: over a link of long latency this delays messages. Not simulated are a step's metadata (three
latencies a stage, mostly hidden) and the collectives at its end.

The same lists of actions are validated, drawn, simulated, and run by the executor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.errors import SettingError
from suite.pipeline.planning.memory import CellMemory
from suite.pipeline.planning.skip_costs import MessageCost
from suite.pipeline.schedule.action import Action, recomputed_in, virtual_stages_of
from suite.pipeline.schedule.flow_control import PREPOSTED_RECVS
from suite.pipeline.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a message between neighbouring stages."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def seconds(self, size: int) -> float:
        """Returns how long a message of ``size`` bytes takes."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a pipeline on several nodes."""

    within_node: Link
    between_nodes: Link
    cuts: frozenset[int]
    """The boundaries k, from stage k to k + 1, between nodes (``suite.pipeline.planning.placement``)."""

    def between(self, source: int, target: int) -> Link:
        """Returns the link between two stages."""
        return (
            self.between_nodes
            if self.cuts.intersection(range(min(source, target), max(source, target)))
            else self.within_node
        )


@dataclass(frozen=True, slots=True)
class CellCost:
    """The cost of one cell for one micro-batch: seconds, bytes of its messages and its memory."""

    forward_s: float
    recompute_s: float
    backward_s: float
    """The full backward."""
    update_s: float = 0.0
    activation_bytes: int = 0
    """Bytes sent to the next cell."""
    gradient_bytes: int = 0
    """Bytes of gradients sent to the previous cell."""
    far_messages: tuple[MessageCost, ...] = ()
    """Skips to cells beyond the next."""
    memory: CellMemory | None = None
    weight_grad_s: float = 0.0
    """The part of the backward that can be deferred."""
    split_s: float = 0.0
    """What splitting the backward costs extra."""

    def seconds(self, kind: str, recomputed: bool) -> float:
        """Returns how long an action takes; a forward whose micro-batch is not recomputed records its graph."""
        if kind == "W":
            return self.weight_grad_s
        if kind == "B":
            return self.backward_s
        if kind == "I":
            return self.backward_s + (self.split_s - self.weight_grad_s)
        return self.forward_s if kind == "F" and recomputed else self.recompute_s


def simulate(schedule: Sequence[Sequence[Action]], cells: Sequence[CellCost], link: Link | Links = Link()) -> Timeline:
    """Returns the timeline of one step; ``cells[v * K + k]`` is the cost of the v-th cell of stage k. The update begins
    when all stages are done, because it needs the global gradient norm.

    Raises SettingError when the schedule deadlocks, or a cost or the link is negative or not finite; ``validate`` finds
    every other error of a schedule.
    """
    _check(schedule, cells, link)
    stages = len(schedule)
    recomputed = [recomputed_in(actions) for actions in schedule]

    def seconds(stage: int, action: Action) -> float:
        cost = cells[action.virtual_stage * stages + stage]
        return cost.seconds(action.kind, (action.virtual_stage, action.micro_batch) in recomputed[stage])

    routes = [Route(k, k + 1, cells[k].activation_bytes, cells[k + 1].gradient_bytes) for k in range(len(cells) - 1)]
    routes += [
        Route(k, far.to, far.activation_bytes, far.gradient_bytes)
        for k, cell in enumerate(cells)
        for far in cell.far_messages
        if (far.to - k) % stages  # between two cells of a stage there is no message
    ]
    links = link if isinstance(link, Links) else Links(link, link, frozenset())
    timed_routes = [route.in_seconds(links.between(route.source % stages, route.target % stages)) for route in routes]
    rows = play(schedule, seconds, timed_routes)
    end = max((row[-1].end for row in rows if row), default=0.0)
    for k, row in enumerate(rows):
        update = sum(cell.update_s for cell in cells[k::stages])
        if update:
            row.append(Span("U", -1, end, end + update))
    return Timeline(tuple(tuple(row) for row in rows))


def _check(schedule: Sequence[Sequence[Action]], cells: Sequence[CellCost], link: Link | Links) -> None:
    faults, virtual_stages = [], virtual_stages_of(schedule)
    if len(schedule) * virtual_stages != len(cells):
        each = f" of {virtual_stages} cells" if virtual_stages > 1 else ""
        faults.append(f"there are costs of {len(cells)} cells, the schedule has {len(schedule)} stages{each}")
    for at, cell in enumerate(cells):
        name_of = f"stage {at % len(schedule)}" if virtual_stages == 1 else f"cell {at}"
        for name in (
            "forward_s",
            "recompute_s",
            "backward_s",
            "update_s",
            "weight_grad_s",
            "split_s",
            "activation_bytes",
            "gradient_bytes",
        ):
            value = getattr(cell, name)
            if not (math.isfinite(value) and value >= 0):
                faults.append(f"{name_of} has {name} = {value}")
        if cell.weight_grad_s > cell.backward_s:
            faults.append(f"{name_of} defers {cell.weight_grad_s} s of a backward of {cell.backward_s} s")
    for each_link in (link.within_node, link.between_nodes) if isinstance(link, Links) else (link,):
        if not (math.isfinite(each_link.latency_s) and each_link.latency_s >= 0 and each_link.bytes_per_s > 0):
            faults.append(f"the link has a latency of {each_link.latency_s} s and {each_link.bytes_per_s} bytes/s")
    if faults:
        raise SettingError(f"a step cannot be simulated: {'; '.join(faults)}; costs must be finite and not negative")


@dataclass(frozen=True, slots=True)
class Route:
    """The messages between two cells: activations forward, gradients backward; in bytes or in seconds."""

    source: int
    target: int
    forward: float
    backward: float
    latency: float = 0.0
    """Seconds, in addition to those for which a message occupies the route."""

    def in_seconds(self, link: Link) -> Route:
        """Returns the route with the seconds that its bytes take on a link."""
        forward, backward = (int(size) / link.bytes_per_s for size in (self.forward, self.backward))
        return Route(self.source, self.target, forward, backward, link.latency_s)


def play(
    schedule: Sequence[Sequence[Action]], seconds: Callable[[int, Action], float], routes: Sequence[Route]
) -> list[list[Span]]:
    """Returns the spans of each stage. ``seconds(stage, action)`` is the cost of an action, ``routes`` hold those of
    messages. Cell v * K + k is the v-th of stage k.

    Raises SettingError when stages wait for each other forever.
    """
    rows: list[list[Span]] = [[] for _ in schedule]
    outputs, inputs = _message_queues(schedule, routes)
    waiting = list(range(len(schedule)))
    while waiting:
        k = waiting.pop()
        while len(rows[k]) < len(schedule[k]):
            action = schedule[k][len(rows[k])]
            i, at = action.micro_batch, action.virtual_stage * len(schedule) + k
            incoming = inputs.get((action.direction, at), ())
            if any(i not in queue.arrived for queue in incoming):
                break
            start = max([*(queue.arrived[i] for queue in incoming), rows[k][-1].end if rows[k] else 0.0])
            rows[k].append(Span(action.kind, i, start, start + seconds(k, action), action.virtual_stage))
            for queue in incoming:
                queue.recv(start)
            for queue in outputs.get((action.direction, at), ()):
                queue.send(i, rows[k][-1].end)
                waiting.append(queue.target % len(schedule))
    stuck = [f"stage {k} at {schedule[k][len(row)]}" for k, row in enumerate(rows) if len(row) < len(schedule[k])]
    if stuck:
        raise SettingError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other")
    return rows


class _MessageQueue:
    """One direction of a route; the target receives its messages in ``order``."""

    def __init__(self, target: int, transfer: float, latency: float, order: Sequence[int]) -> None:
        self.target, self._transfer_s, self._latency, self._order = target, transfer, latency, order
        self.arrived: dict[int, float] = {}
        """The time at which each message arrives."""
        self._posted = dict.fromkeys(order[:PREPOSTED_RECVS], 0.0)  # when the sender learns of the receive
        self._ready: dict[int, float] = {}
        self._free = 0.0
        self._received = 0

    def send(self, i: int, end: float) -> None:
        """The sender has computed message i."""
        self._ready[i] = end
        self._transfer_if_ready(i)

    def recv(self, start: float) -> None:
        """The target receives the next message in its order, and posts another receive."""
        self._received += 1
        for i in self._order[self._received + PREPOSTED_RECVS - 1 : self._received + PREPOSTED_RECVS]:
            self._posted[i] = start + self._latency
            self._transfer_if_ready(i)

    def _transfer_if_ready(self, i: int) -> None:
        if i in self._ready and i in self._posted:
            self._free = max(self._free, self._ready[i], self._posted[i]) + self._transfer_s
            self.arrived[i] = self._free + self._latency


_Queues = dict[tuple[int, int], list[_MessageQueue]]


def _message_queues(schedule: Sequence[Sequence[Action]], routes: Sequence[Route]) -> tuple[_Queues, _Queues]:
    """Returns by direction and cell the queues of outgoing messages, and those of incoming ones."""
    order: dict[tuple[int, int], list[int]] = {}
    for k, actions in enumerate(schedule):
        for action in actions:
            order.setdefault((action.direction, action.virtual_stage * len(schedule) + k), []).append(
                action.micro_batch
            )
    outputs: _Queues = {}
    inputs: _Queues = {}
    for route in routes:
        ends = (1, route.source, route.target, route.forward), (-1, route.target, route.source, route.backward)
        for direction, source, target, transfer in ends:
            queue = _MessageQueue(target, transfer, route.latency, order.get((direction, target), ()))
            outputs.setdefault((direction, source), []).append(queue)
            inputs.setdefault((direction, target), []).append(queue)
    return outputs, inputs
