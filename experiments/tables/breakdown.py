"""Breaks down a step's time from its trace.

    all devices' time = compute + recompute + update + bubble + imbalance + communication

The bubble is the idle time of equal stages with instant messages; imbalance is the further idle time of the actual
stages. Both are simulated from the trace's durations. Communication is the rest: messages, waiting for data, other
work.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments.report.paper import printed
from experiments.report.table import Table, Value
from suite.pipeline.planning.simulate import Route, play
from suite.pipeline.schedule.action import KINDS, Action, virtual_stages_of
from suite.pipeline.schedule.timeline import Timeline
from suite.training.trace import StepTrace

PARTS = ("compute", "recompute", "update", "bubble", "imbalance", "communication")


def shares(timeline: Timeline) -> dict[str, float]:
    """Returns the share of each part; they sum to 1."""
    stages = range(len(timeline.rows))
    whole = len(timeline.rows) * timeline.seconds
    work = sum(timeline.busy(k, "FRIBW") for k in stages)
    update = sum(timeline.busy(k, "U") for k in stages)
    costs = [_mean_seconds(timeline, k) for k in stages]
    even = {kind: statistics.fmean(each[kind] for each in costs) for kind in KINDS}
    evenly, unevenly = (_played(timeline, each) for each in ([even] * len(costs), costs))
    parts = {
        "compute": sum(timeline.busy(k, "FIBW") for k in stages) / whole,
        "recompute": sum(timeline.busy(k, "R") for k in stages) / whole,
        "update": update / whole,
        "bubble": (len(costs) * evenly - work) / whole,
        "imbalance": (unevenly - evenly) / timeline.seconds,
    }
    return {**parts, "communication": 1 - sum(parts.values())}


def breakdown_table(name: str, traces: Sequence[StepTrace], layers: Sequence[int]) -> Table:
    """Returns the mean shares over the traced steps of a run with ``layers`` per stage."""
    each = [shares(trace.timeline) for trace in traces]
    stages, micro_batches = _size(traces[0].timeline)
    paper = printed("breakdown")
    bound = (stages - 1) / (micro_batches + stages - 1)
    beside: dict[str, str] = {
        "recompute": f"at most {paper['rebuild_most']:.0%}",
        "imbalance": f"{paper['imbalance_at_2']:.1%} at K = 2",
        "bubble": f"a little below (K-1)/(M+K-1) = {bound:.1%}",
    }
    rows: list[list[Value]] = [
        [
            part, statistics.fmean(one[part] for one in each), min(one[part] for one in each),
            max(one[part] for one in each), beside.get(part, "-"),
        ]
        for part in PARTS
    ]  # fmt: skip
    headings = ("part", "share (measured)", "least", "most", "paper")
    notes = [
        f"{name}: K = {stages}, M = {micro_batches}, layers per stage {', '.join(map(str, layers))}; "
        f"{len(traces)} traced steps, {statistics.fmean(t.timeline.seconds for t in traces):.3f} s each.",
        "Shares of the time of all stages. Bubble and imbalance are simulated from the measured durations; "
        "communication is the measured rest: messages, waiting for data, other work on the machine.",
        paper["note"],
    ]
    return Table("breakdown", "Where a step's time goes", headings, rows, notes)


def _size(timeline: Timeline) -> tuple[int, int]:
    return len(timeline.rows), sum(span.kind == "F" and not span.virtual_stage for span in timeline.rows[0])


def _mean_seconds(timeline: Timeline, stage: int) -> dict[str, float]:
    """Returns the mean seconds of each kind of action."""

    def mean(kind: str) -> float:
        seconds = [span.seconds for span in timeline.rows[stage] if span.kind == kind]
        return statistics.fmean(seconds) if seconds else 0.0

    return {kind: mean(kind) for kind in KINDS}


def _played(timeline: Timeline, costs: Sequence[dict[str, float]]) -> float:
    """Returns the seconds of the trace's actions at these costs with instant messages."""
    schedule = [
        [Action(span.kind, span.micro_batch, span.virtual_stage) for span in row if span.kind != "U"]
        for row in timeline.rows
    ]
    routes = [Route(at, at + 1, 0.0, 0.0) for at in range(len(schedule) * virtual_stages_of(schedule) - 1)]
    rows = play(schedule, lambda k, action: costs[k][action.kind], routes)
    return max(row[-1].end for row in rows)
