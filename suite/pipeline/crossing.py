"""Skips as a plan sees them: which pass a cut between two layers, and what goes straight from stage to stage.

layer   0    1    2    3    4          a skip from layer 1 to 4 passes the fronts before 2, 3 and 4;
front     |    |    |    |             cut there, it leaves the stage of layer 1 and enters that of layer 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from suite.pipeline.costs import LayerCost


@dataclass(frozen=True, slots=True)
class Crossing:
    """A skip, as the fronts between its layers see it; sizes in bytes."""

    giver: int
    taker: int
    bytes: int
    gradient: int
    same: bool

    def apart_at(self, front: int) -> bool:
        """Whether it is a tensor of its own there: the front behind its giver may have it as an output already."""
        return not (self.same and self.giver == front - 1)


def crossings(costs: Sequence[LayerCost]) -> list[list[Crossing]]:
    """Returns the skips that pass each front, from the one before the first layer to the one behind the last."""
    passing: list[list[Crossing]] = [[] for _ in range(len(costs) + 1)]
    for taker, cost in enumerate(costs):
        for taken in cost.takes:
            skip = Crossing(taker - taken.span, taker, taken.bytes, taken.gradient, taken.same)
            for front in range(skip.giver + 1, taker + 1):
                passing[front].append(skip)
    return passing


def given_twice(front: int, skip: Crossing) -> int:
    """The gradient that comes back beside an output's own, where a skip of the same tensor goes to another stage."""
    return skip.gradient if not skip.apart_at(front) and skip.taker > front else 0


@dataclass(frozen=True, slots=True)
class Message:
    """What goes from one stage to another for each micro-batch, and what comes back; in bytes."""

    to: int
    sends: int
    returns: int


def messages(costs: Sequence[LayerCost], cells: Sequence[range], k: int) -> list[Message]:
    """Returns what stage k sends, nearest stage first: the next stage's share holds the last layer's output."""
    end = cells[k][-1] + 1
    if end == len(costs):
        return []
    stage_of = {layer: at for at, cell in enumerate(cells) for layer in cell}
    passing = crossings(costs)[end]
    apart = [skip for skip in passing if skip.apart_at(end)]
    sums = {k + 1: [costs[end].boundary, costs[end].gradient]}
    for skip in apart:
        sums[k + 1][0] -= skip.bytes
        sums[k + 1][1] -= skip.gradient
    for skip in passing:
        to = stage_of[skip.taker]
        if skip.giver in cells[k] and (to > k + 1 or skip in apart):
            entry = sums.setdefault(to, [0, 0])
            entry[0] += skip.bytes
            entry[1] += skip.gradient
    return [Message(to, *sums[to]) for to in sorted(sums)]
