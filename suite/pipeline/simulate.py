r"""Plays a schedule with any costs and links: when each stage does what, and so how long a step takes.

    stage 0   F0 F1 F2 F3 ....B3 R2 B2 ...      an action starts when the stage is free and its message is there;
                \                               a message leaves when its sender is done, its receive is posted and
    stage 1   ....F0 F1 F2 F3 B3 R2 B2 ...      the link is free, keeps it for bytes / bandwidth, arrives latency later

Receives are posted as ``transport`` posts them, ``WINDOW`` messages ahead of the one that is taken, and it takes the
latency once more until the sender knows: over a link of long latency that is what holds messages up. Left out are a
step's announcements (three latencies a stage, most of them hidden) and what stages say to agree at its end.

The same lists of actions are validated, drawn, played here and walked by the executor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.errors import SettingError
from suite.pipeline.action import Action, put_off_in, rebuilt_in, turns_of
from suite.pipeline.crossing import Message
from suite.pipeline.memory import StageBytes
from suite.pipeline.timeline import Span, Timeline
from suite.pipeline.transport import WINDOW


@dataclass(frozen=True, slots=True)
class Link:
    """What a message between neighbouring stages takes."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def seconds(self, size: int) -> float:
        """Returns how long a message of ``size`` bytes is on its way."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a pipeline that goes over several nodes: ``near`` inside a node, ``far`` between two."""

    near: Link
    far: Link
    cuts: frozenset[int]
    """The boundaries k, from stage k to k + 1, that lie between nodes (``suite.pipeline.placement``)."""

    def between(self, one: int, other: int) -> Link:
        """Returns the link between two stages."""
        return self.far if self.cuts.intersection(range(min(one, other), max(one, other))) else self.near


@dataclass(frozen=True, slots=True)
class StageCost:
    """One cell on its stage and one micro-batch: seconds, and bytes of its messages and of its memory."""

    forward_s: float
    rebuild_s: float
    backward_s: float
    """Of inputs and weights together."""
    update_s: float = 0.0
    sends: int = 0
    """Bytes to the next cell."""
    returns: int = 0
    """Bytes of gradients to the cell before."""
    far: tuple[Message, ...] = ()
    """Skips to cells beyond the next."""
    memory: StageBytes | None = None
    weight_s: float = 0.0
    """The part of the backward that can be put off."""
    split_s: float = 0.0
    """What putting it off costs."""

    def seconds(self, kind: str, rebuilt: bool, put_off: bool) -> float:
        """Returns how long an action takes; a forward whose micro-batch is not rebuilt records its graph."""
        if kind == "W":
            return self.weight_s
        if kind == "B":
            return self.backward_s + (self.split_s - self.weight_s if put_off else 0.0)
        return self.forward_s if kind == "F" and rebuilt else self.rebuild_s


def simulate(schedule: Sequence[Sequence[Action]], cells: Sequence[StageCost], link: Link | Links = Link()) -> Timeline:
    """Returns the timeline of one step; ``cells`` hold the costs of cell v * K + k, the v-th of stage k. The update
    begins when all stages are done: all agree on the norm first.

    Raises SettingError when the schedule deadlocks, or a cost or the link is negative or no number; ``validate`` finds
    every other fault of a schedule.
    """
    _check(schedule, cells, link)
    stages = len(schedule)
    rebuilt, put_off = [rebuilt_in(actions) for actions in schedule], [put_off_in(actions) for actions in schedule]

    def seconds(stage: int, action: Action) -> float:
        one = action.turn, action.micro_batch
        cost = cells[action.turn * stages + stage]
        return cost.seconds(action.kind, one in rebuilt[stage], one in put_off[stage])

    lanes = [Lane(k, k + 1, cells[k].sends, cells[k + 1].returns) for k in range(len(cells) - 1)]
    lanes += [
        Lane(k, far.to, far.sends, far.returns)
        for k, cell in enumerate(cells)
        for far in cell.far
        if (far.to - k) % stages  # what stays on a stage is no message
    ]
    links = link if isinstance(link, Links) else Links(link, link, frozenset())
    timed = [lane.timed(links.between(lane.giver % stages, lane.taker % stages)) for lane in lanes]
    rows = play(schedule, seconds, timed)
    end = max((row[-1].end for row in rows if row), default=0.0)
    for k, row in enumerate(rows):
        update = sum(cell.update_s for cell in cells[k::stages])
        if update:
            row.append(Span("U", -1, end, end + update))
    return Timeline(tuple(tuple(row) for row in rows))


def _check(schedule: Sequence[Sequence[Action]], cells: Sequence[StageCost], link: Link | Links) -> None:
    faults, turns = [], turns_of(schedule)
    if len(schedule) * turns != len(cells):
        each = f" of {turns} cells" if turns > 1 else ""
        faults.append(f"there are costs of {len(cells)} cells, the schedule has {len(schedule)} stages{each}")
    for at, cell in enumerate(cells):
        name_of = f"stage {at % len(schedule)}" if turns == 1 else f"cell {at}"
        for name in ("forward_s", "rebuild_s", "backward_s", "update_s", "weight_s", "split_s", "sends", "returns"):
            value = getattr(cell, name)
            if not (math.isfinite(value) and value >= 0):
                faults.append(f"{name_of} has {name} = {value}")
        if cell.weight_s > cell.backward_s:
            faults.append(f"{name_of} puts off {cell.weight_s} s of a backward of {cell.backward_s} s")
    for one in (link.near, link.far) if isinstance(link, Links) else (link,):
        if not (math.isfinite(one.latency_s) and one.latency_s >= 0 and one.bytes_per_s > 0):
            faults.append(f"the link has a latency of {one.latency_s} s and {one.bytes_per_s} bytes/s")
    if faults:
        raise SettingError(f"a step cannot be played: {'; '.join(faults)}; give finite costs that are not negative")


@dataclass(frozen=True, slots=True)
class Lane:
    """A way of messages between two cells: forward activations, back their gradients; bytes, or seconds."""

    giver: int
    taker: int
    forward: float
    back: float
    latency: float = 0.0
    """Seconds, beside those for which a message keeps the lane."""

    def timed(self, link: Link) -> Lane:
        """Returns the lane with the seconds that its bytes take."""
        forward, back = (int(size) / link.bytes_per_s for size in (self.forward, self.back))
        return Lane(self.giver, self.taker, forward, back, link.latency_s)


def play(
    schedule: Sequence[Sequence[Action]], seconds: Callable[[int, Action], float], lanes: Sequence[Lane]
) -> list[list[Span]]:
    """Returns the spans of each stage; ``seconds(stage, action)`` are its cost, ``lanes`` hold those of messages. Cell
    v * K + k is the v-th of stage k.

    Raises SettingError when stages wait for each other for ever.
    """
    rows: list[list[Span]] = [[] for _ in schedule]
    out, into = _ways(schedule, lanes)
    waiting = list(range(len(schedule)))
    while waiting:
        k = waiting.pop()
        while len(rows[k]) < len(schedule[k]):
            action = schedule[k][len(rows[k])]
            kind, i, at = action.kind, action.micro_batch, action.turn * len(schedule) + k
            coming = into.get((kind, at), ())
            if any(i not in way.there for way in coming):
                break
            start = max([*(way.there[i] for way in coming), rows[k][-1].end if rows[k] else 0.0])
            rows[k].append(Span(kind, i, start, start + seconds(k, action), action.turn))
            for way in coming:
                way.take(start)
            for way in out.get((kind, at), ()):
                way.give(i, rows[k][-1].end)
                waiting.append(way.taker % len(schedule))
    stuck = [f"stage {k} at {schedule[k][len(row)]}" for k, row in enumerate(rows) if len(row) < len(schedule[k])]
    if stuck:
        raise SettingError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other")
    return rows


class _Way:
    """One direction of a lane: what is on it, of the messages that its taker takes in ``order``."""

    def __init__(self, taker: int, transfer: float, latency: float, order: Sequence[int]) -> None:
        self.taker, self._transfer, self._latency, self._order = taker, transfer, latency, order
        self.there: dict[int, float] = {}
        """When a message has arrived."""
        self._posted = dict.fromkeys(order[:WINDOW], 0.0)  # when the sender knows that a receive waits for it
        self._ready: dict[int, float] = {}
        self._free = 0.0
        self._taken = 0

    def give(self, i: int, end: float) -> None:
        """The giver has made message i."""
        self._ready[i] = end
        self._leave(i)

    def take(self, start: float) -> None:
        """The taker takes the next message in its order, and posts another receive."""
        self._taken += 1
        for i in self._order[self._taken + WINDOW - 1 : self._taken + WINDOW]:
            self._posted[i] = start + self._latency
            self._leave(i)

    def _leave(self, i: int) -> None:
        if i in self._ready and i in self._posted:
            self._free = max(self._free, self._ready[i], self._posted[i]) + self._transfer
            self.there[i] = self._free + self._latency


_Ways = dict[tuple[str, int], list[_Way]]


def _ways(schedule: Sequence[Sequence[Action]], lanes: Sequence[Lane]) -> tuple[_Ways, _Ways]:
    """Returns by kind and cell the ways out of each cell, and those into it."""
    order: dict[tuple[str, int], list[int]] = {}
    for k, actions in enumerate(schedule):
        for action in actions:
            order.setdefault((action.kind, action.turn * len(schedule) + k), []).append(action.micro_batch)
    out: _Ways = {}
    into: _Ways = {}
    for lane in lanes:
        ends = ("F", lane.giver, lane.taker, lane.forward), ("B", lane.taker, lane.giver, lane.back)
        for kind, giver, taker, transfer in ends:
            way = _Way(taker, transfer, lane.latency, order.get((kind, taker), ()))
            out.setdefault((kind, giver), []).append(way)
            into.setdefault((kind, taker), []).append(way)
    return out, into
