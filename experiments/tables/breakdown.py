"""The table of where a step's time goes, from the trace of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments.planning.step_parts import PARTS, shares
from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from suite.training.trace import StepTrace


def breakdown_table(
    name: str,
    traces: Sequence[StepTrace],
    layers: Sequence[int],
    mfu: float | None = None,
    cell_to_stage: tuple[int, ...] = (),
) -> Table:
    """Returns the mean shares over the traced steps of a run with ``layers`` per stage, and of what ``mfu`` is made."""
    steps = [shares(trace.timeline, cell_to_stage) for trace in traces]
    first = traces[0].timeline.rows
    stages, micro_batches = len(first), sum(span.kind == "F" and not span.virtual_stage for span in first[0])
    paper = paper_numbers("breakdown")
    bound = (stages - 1) / (micro_batches + stages - 1)
    paper_values = {
        "recompute": f"at most {paper['max_recompute']:.0%}",
        "imbalance": f"{paper['imbalance_at_2']:.1%} at K = 2",
        "bubble": f"a little below (K-1)/(M+K-1) = {bound:.1%}",
    }
    rows: list[list[Value]] = []
    for part in PARTS:
        values = [shares_of_step[part] for shares_of_step in steps]
        rows.append([part, statistics.fmean(values), min(values), max(values), paper_values.get(part, "-")])
    headings = ("part", "share (measured)", "least", "most", "paper")
    notes = [
        f"{name}: K = {stages}, M = {micro_batches}, layers per stage {', '.join(map(str, layers))}; "
        f"{len(traces)} traced steps, {statistics.fmean(t.timeline.seconds for t in traces):.3f} s each.",
        "Shares of the time of all stages. Bubble and imbalance are simulated from the measured durations; "
        "communication is the measured rest: messages, waiting for data, other work on the machine.",
        paper["note"],
    ]
    if mfu is not None:
        compute = statistics.fmean(shares_of_step["compute"] for shares_of_step in steps)
        notes.insert(
            2,
            f"MFU of the run {mfu:.1%} = compute {compute:.1%} x {mfu / compute:.1%}, the share of the peak that "
            "forwards and backwards reach while they run.",
        )
    return Table("breakdown", "Where a step's time goes", headings, rows, notes)
