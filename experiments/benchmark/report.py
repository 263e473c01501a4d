"""The page of a benchmark case: what to take from it at a glance, the pairs that recompute alike, every entrant."""

from __future__ import annotations

import math

from experiments.benchmark.ratio import FEWEST_ROUNDS, PRECISION, Ratio
from experiments.benchmark.results import KINDS, PARTS, TOLERANCE, Kind, Result, Score
from experiments.report.figure import COLOURS, INK, new_figure
from experiments.report.page import Page, Picture, Section
from experiments.report.table import Table, Value

HEADINGS = (
    "entrant", "step s (measured)", "rounds", "ideal fill-drain s (computed)", "ideal / step", "peak MiB (measured)",
    "gradient difference", "remark",
)  # fmt: skip

OVER = {"all": "over the fastest peer", "alike": "alike", "in its memory": "in its memory"}


def page(result: Result) -> Page:
    """Returns the page."""
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
        "summary", "Speed of the suite over the fastest peers (measured)", ("the suite", *OVER.values()), rows,
        [
            "A ratio is the peer's seconds over the suite's in the same round: the median over rounds and its 95% "
            "interval (bootstrap). Ahead: the interval is above 1. Behind: it is below. Level: it contains 1, and is "
            f"within ±{PRECISION:.0%}. Undecided: it contains 1 and is wider, or there are fewer than {FEWEST_ROUNDS} "
            "rounds, too few for an interval.",
            "The fastest peer is the one with the lowest ratio in these rounds. Where several peers are close, the "
            "choice makes the ratio a little too low, so it favours the peers.",
            "Alike: peers that recompute like it. In its memory: peers whose peak is at most 1% above its own; for an "
            "entrant planned under a memory limit, at most 1% above that limit.",
        ],
    )  # fmt: skip


def _pairs(result: Result, recomputes: bool) -> list[Table]:
    """Returns the ratios of our entrants over each peer that recomputes alike; nothing without both."""
    ours = [score for score in result.ours if score.recomputes is recomputes]
    found = {score.entrant: {peer.entrant: ratio for peer, ratio in result.compared(score, "alike")} for score in ours}
    peers = [s for s in result.scores if not s.is_ours and any(s.entrant in ratios for ratios in found.values())]
    if not peers:
        return []
    rows: list[list[Value]] = [
        [peer.entrant, *(str(ratios[peer.entrant]) if peer.entrant in ratios else None for ratios in found.values())]
        for peer in sorted(peers, key=lambda peer: peer.median)
    ]
    how = "recompute" if recomputes else "do not recompute"
    return [Table(f"pairs-{how}", f"Speed over each peer, of those that {how}", ("over", *found), rows, [])]


def entrants_table(result: Result) -> Table:
    """Returns all entrants, ours first, sorted by speed."""
    rows: list[list[Value]] = []
    for score in sorted(result.scores, key=lambda s: (not s.ran, not s.is_ours, s.median if s.ran else 0.0)):
        if not score.ran:
            rows.append([score.entrant, *[None] * (len(HEADINGS) - 2), score.remark])
            continue
        ideal_s, rounds = None if math.isnan(score.ideal_s) else score.ideal_s, len(score.seconds_by_round)
        rows.append(
            [
                score.entrant, score.median, rounds, ideal_s, ideal_s / score.median if ideal_s else None,
                score.peak_bytes / 2**20 if score.peak_bytes is not None else None, score.difference,
                "WRONG GRADIENTS" if score.wrong else score.remark,
            ]
        )  # fmt: skip
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
        f"A turn is {case.steps} steps; {where}, one thread per process. Rounds go on until every ratio has "
        f"{FEWEST_ROUNDS} rounds and an interval within ±{PRECISION:.0%}, or until the case has taken "
        f"{case.time_limit_s:.0f} s. Entrants that no open ratio needs leave after an even number of rounds, so "
        "compare medians only between entrants with equal rounds; ratios are taken within rounds. A step is forward "
        "and backward of one mini-batch, gradients averaged over replicas, no update; its time is that of the slowest "
        "worker.",
        f"A stage has {2 * work.micro_batches} forwards and backwards in a step, recomputes aside: 1 ms a step is "
        f"{1e3 / (2 * work.micro_batches):.3g} µs for each.",
        "Ideal fill-drain: without message times, (M+K-1)(F+B) + (M-1)R with recompute, (M+K-1)(F+B) without, from "
        "F, R, B measured alone. Other schedules can be faster.",
        "Peak: bytes that a step allocates (activations, messages, gradients), on the stage with the highest peak.",
        "Gradient difference: the largest over all parameters, from one process with the whole model and as "
        f"many threads; above {TOLERANCE} it is wrong.",
    ]


def _picture(result: Result) -> list[Picture]:
    """Returns the summary's ratios with their intervals; nothing if no ratio has one."""
    ours = [score for score in reversed(result.ours) if _with_interval(result, score, "all") is not None]
    if not ours:
        return []
    figure, axis = new_figure("times as fast as the fastest peer", "", (8.0, 0.9 + 0.42 * len(ours)))
    axis.xaxis.set_major_formatter("{x:.2f}")
    for place, kind in enumerate(KINDS):
        ratios = [_with_interval(result, score, kind) for score in ours]
        points = [(row, ratio) for row, ratio in enumerate(ratios) if ratio is not None]
        axis.errorbar(
            [ratio.median for _, ratio in points], [row + 0.2 * (1 - place) for row, _ in points],
            xerr=[[r.median - r.low for _, r in points], [r.high - r.median for _, r in points]],
            fmt="o", markersize=4, capsize=3, linewidth=1.2, color=COLOURS[place], label=OVER[kind],
        )  # fmt: skip
    axis.axvline(1, color=INK, linewidth=1, linestyle="--")
    axis.set_yticks(range(len(ours)), [_short(score) for score in ours])
    axis.legend(frameon=False, fontsize=8)
    return [
        Picture("ratios", figure, "Speed over the fastest peer, with 95% intervals; right of 1 the suite is ahead.")
    ]


def _with_interval(result: Result, score: Score, kind: Kind) -> Ratio | None:
    found = result.best(score, kind)
    return found[1] if found is not None and found[1].has_interval else None


def _short(score: Score) -> str:
    return score.entrant.removeprefix("suite ")
