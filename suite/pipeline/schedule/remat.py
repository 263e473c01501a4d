"""Which activations are freed after the forward and recomputed for the backward, within a number of live graphs.

    most graphs alive at once          0                      1 (the paper)          2                 M
    fill-drain of 4 micro-batches      R3 B3 R2 B2 R1 B1 ..   B3 R2 B2 R1 B1 ..      B3 B2 R1 B1 ..    B3 B2 B1 B0

A graph is alive from the forward, or from the recompute, to the end of the backward. At most so many graphs of a cell
are alive at once, recomputed ones included. Within that limit as many micro-batches as possible keep the graph of their
forward. With 0 none does; a recompute still makes one at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from suite.pipeline.schedule.action import Action

UNLIMITED = 1 << 30
"""Enough graphs for any mini-batch: nothing is recomputed."""

MAX_LIVE_GRAPHS = {"always": 0, "except_last": 1, "never": UNLIMITED}
"""The most live graphs for each value of ``pipeline.remat``."""


def with_recomputes(actions: Sequence[Action], max_live_graphs: Sequence[int]) -> list[Action]:
    """Returns a stage's actions with an ``R`` before each backward that needs one; ``max_live_graphs`` has an entry for
    each virtual stage."""
    kept = {
        (virtual_stage, i)
        for virtual_stage, max_graphs in enumerate(max_live_graphs)
        for i in _kept_graphs(actions, virtual_stage, max_graphs)
    }
    with_recompute: list[Action] = []
    for action in actions:
        if action.direction < 0 and (action.virtual_stage, action.micro_batch) not in kept:
            with_recompute.append(Action("R", action.micro_batch, action.virtual_stage))
        with_recompute.append(action)
    return with_recompute


def _kept_graphs(actions: Sequence[Action], virtual_stage: int, max_graphs: int) -> list[int]:
    """Returns the micro-batches of one cell whose graphs are kept.

    One graph is always that of the running backward; the other ``max_graphs`` - 1 are slots. In the order of backwards,
    each micro-batch that finds a free slot keeps its graph, in the slot that became free last (interval scheduling on k
    machines, Faigle and Nawijn, 1995). One whose backward is the next after its forward needs no slot. Time is counted
    in backwards done.
    """
    forwards = [a.micro_batch for a in actions if a.virtual_stage == virtual_stage and a.kind == "F"]
    if max_graphs == 0 or max_graphs >= len(forwards):
        return forwards if max_graphs else []
    begins, ends = {}, {}
    backwards = 0
    for action in actions:
        if action.virtual_stage == virtual_stage and action.kind == "F":
            begins[action.micro_batch] = backwards  # the first backward after it
        elif action.virtual_stage == virtual_stage and action.direction < 0:
            ends[action.micro_batch] = backwards
            backwards += 1
    # when each slot becomes free: after its micro-batch's backward
    slots = [0] * (max_graphs - 1)
    kept = []
    for i, end in ends.items():
        if begins[i] < end:
            slot = bisect_right(slots, begins[i]) - 1
            if slot < 0:
                continue
            del slots[slot]
            slots.append(end)
        kept.append(i)
    return kept
