"""The page of a benchmark case: what to take from it at a glance, the pairs that recompute alike, every entrant."""

from __future__ import annotations

from experiments.report.figure import COLOURS, INK, new_figure
from experiments.report.page import Page, Picture, Section
from experiments.report.table import Table, Value
from tests.bench.ratio import PRECISION
from tests.bench.results import KINDS, PARTS, TOLERANCE, Result

HEADINGS = (
    "entrant",
    "step s (measured)",
    "ideal fill-drain s (computed)",
    "ideal / step",
    "peak MiB (measured)",
    "gradient difference",
    "remark",
)

OVER = {"all": "over the fastest peer", "alike": "alike", "in its memory": "in its memory"}


def page(result: Result) -> Page:
    return Page(
        f"Benchmark, {result.case.title}",
        [
            Section("At a glance", tables=[summary(result)], pictures=_picture(result)),
            Section("Pairs", tables=[table for recomputes in (True, False) for table in _pairs(result, recomputes)]),
            Section("Entrants", tables=[entrants_table(result)]),
        ],
        name=result.case.name,
    )


def summary(result: Result) -> Table:
    """Returns one row for each of our entrants, the fastest first: how much faster than the fastest peers it is."""
    rows: list[list[Value]] = []
    for score in result.ours:
        found = [result.best(score, kind) for kind in KINDS]
        stands = [f"{best[1]}, {best[1].verdict} {best[0].entrant}" if best is not None else None for best in found]
        rows.append([score.entrant, *stands])
    return Table(
        "summary",
        "Speed of the suite over the fastest peers (measured)",
        ("the suite", *OVER.values()),
        rows,
        [
            "A ratio is the peer's seconds over the suite's in the same round: the median over rounds and its 95% "
            "interval (bootstrap). Ahead: the interval is above 1. Behind: it is below. Level: it contains 1, and is "
            f"within ±{PRECISION:.0%}. Undecided: it contains 1 and is wider.",
            "The fastest peer is the one with the lowest ratio in these rounds. Where several peers are close, the "
            "choice makes the ratio a little too low, so it favours the peers.",
            "Alike: peers that recompute like it. In its memory: peers whose peak is at most 1% above its own; for an "
            "entrant planned under a memory limit, at most 1% above that limit.",
        ],
    )


def _pairs(result: Result, recomputes: bool) -> list[Table]:
    """Returns the ratios of our entrants over each peer that recomputes alike; nothing without both."""
    ours = [score for score in result.ours if score.recomputes is recomputes]
    found = {score.entrant: {peer.entrant: ratio for peer, ratio in result.compared(score, "alike")} for score in ours}
    peers = [peer for peer, _ in result.compared(ours[0], "alike")] if ours else []
    if not peers:
        return []
    rows: list[list[Value]] = [
        [peer.entrant, *(str(ratios[peer.entrant]) for ratios in found.values())]
        for peer in sorted(peers, key=lambda peer: peer.median)
    ]
    how = "recompute" if recomputes else "do not recompute"
    return [Table(f"pairs-{how}", f"Speed over each peer, of those that {how}", ("over", *found), rows, [])]


def entrants_table(result: Result) -> Table:
    """Returns all entrants, ours first, sorted by speed."""
    rows: list[list[Value]] = []
    for score in sorted(result.scores, key=lambda s: (not s.rounds, not s.is_ours, s.rounds and s.median)):
        if not score.rounds:
            rows.append([score.entrant, *[None] * (len(HEADINGS) - 2), score.remark])
            continue
        rows.append(
            [
                score.entrant,
                score.median,
                score.ideal_s,
                score.ideal_s and score.ideal_s / score.median,
                score.peak_bytes / 2**20,
                score.difference,
                "WRONG GRADIENTS" if score.wrong else score.remark,
            ]
        )
    return Table("entrants", "All entrants", HEADINGS, rows, _notes(result))


def _notes(result: Result) -> list[str]:
    case, work = result.case, result.case.work
    where = (
        "each in processes of its own, which wait while others run"
        if case.own_processes
        else "all in the same processes"
    )
    each = [sum(getattr(cost, name) for cost in result.costs) / work.stages * 1e3 for name in PARTS]
    return [
        f"{work}; cells of {', '.join(map(str, result.cells))} layers; mean costs of a stage, measured alone: "
        f"F {each[0]:.3g} ms, R {each[1]:.3g} ms, B {each[2]:.3g} ms.",
        f"A turn is {case.steps} steps; {where}, one thread per process; {case.rounds} rounds. Ratios are taken "
        "within rounds. A step is forward and backward of one mini-batch, gradients averaged over replicas, no update; "
        "its time is that of the slowest worker.",
        f"A stage has {2 * work.micro_batches} forwards and backwards in a step, recomputes aside: 1 ms a step is "
        f"{1e3 / (2 * work.micro_batches):.3g} µs for each.",
        "Ideal fill-drain: without message times, (M+K-1)(F+B) + (M-1)R with recompute, (M+K-1)(F+B) without, from "
        "F, R, B measured alone. Other schedules can be faster.",
        "Peak: bytes that a step allocates (activations, messages, gradients), on the stage with the highest peak.",
        "Gradient difference: the largest over all parameters, from one process with the whole model and as "
        f"many threads; above {TOLERANCE} it is wrong.",
    ]


def _picture(result: Result) -> list[Picture]:
    """Returns the summary's ratios with their intervals; nothing without peers."""
    ours = [score for score in reversed(result.ours) if result.best(score, "all") is not None]
    if not ours:
        return []
    figure, axis = new_figure("times as fast as the fastest peer", "", (8.0, 0.9 + 0.42 * len(ours)))
    axis.xaxis.set_major_formatter("{x:.2f}")
    for place, kind in enumerate(KINDS):
        found = [result.best(score, kind) for score in ours]
        points = [(row, best[1]) for row, best in enumerate(found) if best is not None]
        axis.errorbar(
            [ratio.median for _, ratio in points],
            [row + 0.2 * (1 - place) for row, _ in points],
            xerr=[[r.median - r.low for _, r in points], [r.high - r.median for _, r in points]],
            fmt="o",
            markersize=4,
            capsize=3,
            linewidth=1.2,
            color=COLOURS[place],
            label=OVER[kind],
        )
    axis.axvline(1, color=INK, linewidth=1, linestyle="--")
    axis.set_yticks(range(len(ours)), [score.entrant.removeprefix("suite ") for score in ours])
    axis.legend(frameon=False, fontsize=8)
    return [
        Picture("ratios", figure, "Speed over the fastest peer, with 95% intervals; right of 1 the suite is ahead.")
    ]
