"""Which activations are thrown away after the forward and made again for the backward: a dial, not a switch.

    graphs that may stand at once      0                      1 (the paper)          2                 M
    fill-drain of 4 micro-batches      R3 B3 R2 B2 R1 B1 ..   B3 R2 B2 R1 B1 ..      B3 B2 R1 B1 ..    B3 B2 B1 B0

A graph stands from the forward, or from the rebuild, to the end of the backward. Kept are as many micro-batches as can
be while no more than so many graphs stand at once, the one of a rebuild included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from suite.pipeline.action import Action

ALL = 1 << 30
"""Graphs enough for any mini-batch: nothing is rebuilt."""

GRAPHS = {"always": 0, "except_last": 1, "never": ALL}
"""What ``pipeline.remat`` stands for."""


def with_rebuilds(actions: Sequence[Action], graphs: Sequence[int]) -> list[Action]:
    """Returns a stage's actions with a rebuild right before each backward that needs one; ``graphs`` by turn."""
    kept = {(turn, i) for turn, most in enumerate(graphs) for i in _kept(actions, turn, most)}
    walk: list[Action] = []
    for action in actions:
        if action.kind == "B" and (action.turn, action.micro_batch) not in kept:
            walk.append(Action("R", action.micro_batch, action.turn))
        walk.append(action)
    return walk


def _kept(actions: Sequence[Action], turn: int, most: int) -> list[int]:
    """Returns the micro-batches of one cell whose graphs are kept.

    Of intervals on a line, as many as can be with at most so many over any point are found by taking them by their
    ends, each that still fits, in the place that became free last (Faigle and Nawijn, 1995). Every backward is a point,
    and the rebuild before it counts.
    """
    forwards = [a.micro_batch for a in actions if a.turn == turn and a.kind == "F"]
    if most == 0 or most >= len(forwards):
        return forwards if most else []
    begins, ends = {}, {}
    backwards = 0
    for action in actions:
        if action.turn == turn and action.kind == "F":
            begins[action.micro_batch] = backwards  # the first backward after it
        elif action.turn == turn and action.kind == "B":
            ends[action.micro_batch] = backwards
            backwards += 1
    # one graph is that of the backward itself; each other place is taken until the backward of what is kept there
    places = [0] * (most - 1)
    kept = []
    for i, end in ends.items():
        if begins[i] < end:
            place = bisect_right(places, begins[i]) - 1
            if place < 0:
                continue
            del places[place]
            places.append(end)
        kept.append(i)
    return kept
