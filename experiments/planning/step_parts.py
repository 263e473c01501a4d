"""Breaks down a step's time from its trace.

    all devices' time = compute + recompute + update + bubble + imbalance + communication

The bubble is the idle time of equal stages with instant messages; imbalance is the further idle time of the actual
stages. Both are simulated from the trace's durations. Communication is the rest: messages, waiting for data, other
work.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.schedule.action import KINDS, Action, virtual_stages_of
from suite.pipeline.schedule.play import DIRECTIONS, Route, play
from suite.pipeline.schedule.timeline import Timeline

PARTS = ("compute", "recompute", "update", "bubble", "imbalance", "communication")
OUTSIDE = "outside the trace"


def shares(timeline: Timeline, cell_to_stage: tuple[int, ...] = ()) -> dict[str, float]:
    """Returns the share of each part; they sum to 1. ``cell_to_stage`` as in ``CellPlacement``."""
    stages = range(len(timeline.rows))
    whole = len(timeline.rows) * timeline.seconds
    work = sum(timeline.busy(k, "FRIBW") for k in stages)
    update = sum(timeline.busy(k, "U") for k in stages)
    costs = [_mean_seconds(timeline, k) for k in stages]
    mean = {kind: statistics.fmean(cost[kind] for cost in costs) for kind in KINDS}
    equal_s, actual_s = (
        _simulated_s(timeline, stages_costs, cell_to_stage) for stages_costs in ([mean] * len(costs), costs)
    )
    parts = {
        "compute": sum(timeline.busy(k, "FIBW") for k in stages) / whole,
        "recompute": sum(timeline.busy(k, "R") for k in stages) / whole,
        "update": update / whole,
        "bubble": (len(costs) * equal_s - work) / whole,
        "imbalance": (actual_s - equal_s) / timeline.seconds,
    }
    return {**parts, "communication": 1 - sum(parts.values())}


def slower_than_planned(
    planned: Timeline, measured: Sequence[Timeline], step_s: float, cell_to_stage: tuple[int, ...] = ()
) -> dict[str, float]:
    """Returns by how many seconds each part of a step of ``step_s`` is longer than planned; they sum to the difference.

    Parts are means over stages and over the traced steps; ``OUTSIDE`` is the time of a step before and after its trace.
    """
    found = dict.fromkeys((*PARTS, OUTSIDE), 0.0)
    for timeline in measured:
        for part, share in shares(timeline, cell_to_stage).items():
            found[part] += share * timeline.seconds / len(measured)
    found[OUTSIDE] = step_s - sum(found.values())
    for part, share in shares(planned, cell_to_stage).items():
        found[part] -= share * planned.seconds
    return found


def _mean_seconds(timeline: Timeline, stage: int) -> dict[str, float]:
    means = dict.fromkeys(KINDS, 0.0)
    for kind in KINDS:
        if seconds := [span.seconds for span in timeline.rows[stage] if span.kind == kind]:
            means[kind] = statistics.fmean(seconds)
    return means


def _simulated_s(timeline: Timeline, costs: Sequence[dict[str, float]], cell_to_stage: tuple[int, ...]) -> float:
    """Returns the seconds of the trace's actions at these costs with instant messages."""
    schedule = [
        [Action(span.kind, span.micro_batch, span.virtual_stage) for span in row if span.kind != "U"]
        for row in timeline.rows
    ]
    placement, cells = CellPlacement(len(schedule), cell_to_stage), range(len(schedule) * virtual_stages_of(schedule))
    of_cells = [costs[placement.stage_of(cell)] for cell in cells]
    seconds = {kind: [cost[kind.upper()] for cost in of_cells] for kind in DIRECTIONS}
    played = play(schedule, seconds, [Route(at, at + 1) for at in cells[:-1]], cell_to_stage=cell_to_stage)
    return max(row[-1].end for row in played.rows)
