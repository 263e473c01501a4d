r"""Plays a schedule with any costs and links: when each stage does what, and so how long a step takes.

    stage 0   F0 F1 F2 F3 ....B3 R2 B2 ...      an action starts when the stage is free and its message is there;
                \                               a message leaves when its sender is done and the link is free,
    stage 1   ....F0 F1 F2 F3 B3 R2 B2 ...      and arrives latency + bytes / bandwidth later

The same lists of actions are validated, drawn, played here and walked by the executor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.errors import SettingError
from suite.pipeline.action import Action, put_off_in, rebuilt_in, turns_of
from suite.pipeline.crossing import Message
from suite.pipeline.memory import StageBytes
from suite.pipeline.timeline import Span, Timeline


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
    lanes += [Lane(k, far.to, far.sends, far.returns) for k, cell in enumerate(cells) for far in cell.far]
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

    def timed(self, link: Link) -> Lane:
        """Returns the lane with the seconds that its bytes take."""
        return Lane(self.giver, self.taker, link.seconds(int(self.forward)), link.seconds(int(self.back)))


def play(
    schedule: Sequence[Sequence[Action]], seconds: Callable[[int, Action], float], lanes: Sequence[Lane]
) -> list[list[Span]]:
    """Returns the spans of each stage; ``seconds(stage, action)`` are its cost, ``lanes`` hold those of messages. Cell
    v * K + k is the v-th of stage k.

    Raises SettingError when stages wait for each other for ever.
    """
    rows: list[list[Span]] = [[] for _ in schedule]
    out = {kind: _ways(lanes, kind) for kind in "FB"}
    awaited = {kind: Counter(to for ways in out[kind].values() for to, _ in ways) for kind in "FB"}
    arrivals: dict[tuple[int, str, int], list[float]] = {}  # when the messages that an action needs are there
    free: dict[tuple[str, int, int], float] = {}  # when a lane is
    waiting = list(range(len(schedule)))
    while waiting:
        k = waiting.pop()
        while len(rows[k]) < len(schedule[k]):
            action = schedule[k][len(rows[k])]
            kind, i, at = action.kind, action.micro_batch, action.turn * len(schedule) + k
            sends = kind in "FB"
            there = arrivals.get((at, kind, i), [])
            if sends and len(there) < awaited[kind][at]:
                break
            start = max([*there, rows[k][-1].end if rows[k] else 0.0])
            rows[k].append(Span(kind, i, start, start + seconds(k, action), action.turn))
            for to, transfer in out[kind].get(at, ()) if sends else ():
                sent = max(rows[k][-1].end, free.get((kind, at, to), 0.0))
                free[kind, at, to] = sent + transfer
                arrivals.setdefault((to, kind, i), []).append(sent + transfer)
                waiting.append(to % len(schedule))
    stuck = [f"stage {k} at {schedule[k][len(row)]}" for k, row in enumerate(rows) if len(row) < len(schedule[k])]
    if stuck:
        raise SettingError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other")
    return rows


def _ways(lanes: Sequence[Lane], kind: str) -> dict[int, list[tuple[int, float]]]:
    """Returns for each cell where its messages of one kind go, and their seconds."""
    ways: dict[int, list[tuple[int, float]]] = {}
    for lane in lanes:
        if kind == "F":
            ways.setdefault(lane.giver, []).append((lane.taker, lane.forward))
        else:
            ways.setdefault(lane.taker, []).append((lane.giver, lane.back))
    return ways
