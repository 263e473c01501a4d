"""Benchmark cases of the suite against its peers on the same work, and the evaluation of their times.

Entrants are interleaved: each round runs every entrant once, and the order rotates from round to round. Entrants
that only sleep share their processes. Entrants that compute get fresh processes each time, because the memory of
twenty others slows an entrant by a tenth. A step's time is that of its slowest worker. The gradients of one step are
compared with those of one process with the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.benchmark.peers.peer import Entrant
from experiments.benchmark.peers.workload import BenchWorkload, LanguageModelWork, SyntheticWork, TranslationWork
from experiments.report.table import Table, Value, relative_spread
from suite.errors import SettingError, nearest
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.planning.simulate import CellCost, simulate
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS

TOLERANCE = 1e-4
"""Largest allowed relative difference of a gradient from one process's; fp32 sums in another order."""


@dataclass(frozen=True)
class Case:
    """One table of the benchmark."""

    work: BenchWorkload
    rounds: int = 3
    steps: int = 1
    """Steps of each entrant in a round."""
    warm_ups: int = 0
    """Unmeasured steps before these, so that a measured step finds the memory that a previous step left, as in
    training."""
    fresh_processes: bool = False
    """Whether each entrant gets fresh processes in each round."""

    @property
    def name(self) -> str:
        """Name of its files and its table."""
        work = self.work
        replicas = f"-r{work.replicas}" if work.replicas > 1 else ""
        return f"bench-{work.name}-k{work.stages}-m{work.micro_batches}{replicas}"

    @property
    def title(self) -> str:
        """Title of its table."""
        work = self.work
        replicas = f", R = {work.replicas}" if work.replicas > 1 else ""
        return f"{work.name}: K = {work.stages}, M = {work.micro_batches}{replicas}"


CASES: dict[str, tuple[Case, ...]] = {
    "sleeping": (
        *(Case(SyntheticWork(k, m)) for k, m in ((2, 8), (4, 8), (8, 8), (8, 32))),
        Case(SyntheticWork(16, 64), rounds=2),  # more than a minute a round
    ),
    "layers": (Case(LanguageModelWork(2, 8), warm_ups=1, fresh_processes=True),),
    "translation": (Case(TranslationWork(2, 8), steps=2, warm_ups=1, fresh_processes=True),),
    "replicas": (Case(SyntheticWork(2, 8, replicas=2, parameters=1 << 20)),),
}


def cases(name: str) -> tuple[Case, ...]:
    """Returns the cases of a name, or of ``all``. Raises SettingError for an unknown name."""
    if name == "all":
        return tuple(case for some in CASES.values() for case in some)
    if name not in CASES:
        raise SettingError(f"there is no benchmark {name!r}; {nearest(name, [*CASES, 'all'])}")
    return CASES[name]


def order(count: int, at: int, rounds: int) -> list[int]:
    """Returns the order of entrants in round ``at``. It rotates, so each entrant runs early and late."""
    first = at * count // max(1, rounds)
    return [(first + place) % count for place in range(count)]


def ideal_fill_drain_s(costs: Sequence[LayerCost], cells: Sequence[int], micro_batches: int, recomputes: bool) -> float:
    """Returns the seconds of a fill-drain step without message times. For equal stages this is

    (M+K-1)(F+B) + (M-1)R with early recompute, (M+K-1)(F+B) without; for unequal ones the schedule is simulated.
    """
    stages = []
    for cell in cell_ranges(cells, len(costs)):
        in_cell = [costs[index] for index in cell]
        forward, recompute, backward = (
            sum(getattr(cost, name) for cost in in_cell) for name in ("forward_s", "recompute_s", "backward_s")
        )
        stages.append(CellCost(forward, recompute, backward))
    schedule_config = ScheduleConfig(max_live_graphs=(MAX_LIVE_GRAPHS["except_last" if recomputes else "never"],))
    return simulate(schedule_config.actions(len(cells), micro_batches), stages).seconds


@dataclass(frozen=True)
class Score:
    """The result of one entrant in one case."""

    entrant: str
    is_ours: bool
    recomputes: bool | None
    """None: only some micro-batches are recomputed."""
    rounds: tuple[tuple[float, ...], ...] = ()
    """Seconds of each step of each round, on the slowest worker."""
    peak_bytes: int | None = None
    """Peak bytes that a step allocates, on the stage with the highest peak."""
    difference: float | None = None
    """Largest relative difference of a parameter's gradient from one process's; infinite if one is missing."""
    lower_bound_s: float = math.nan
    memory_limit_bytes: int | None = None
    """The memory limit of its plan in bytes."""
    simulated_s: float | None = None
    remark: str = ""

    @property
    def ran(self) -> bool:
        """Whether it has any measured steps."""
        return bool(self.rounds)

    @property
    def seconds(self) -> list[float]:
        """Seconds of all steps."""
        return [second for some in self.rounds for second in some]

    @property
    def median(self) -> float:
        """Median of the steps' seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return relative_spread(self.seconds)

    @property
    def over_memory_limit(self) -> bool:
        """Whether it exceeded the memory limit of its plan."""
        if self.memory_limit_bytes is None or self.peak_bytes is None:
            return False
        return self.peak_bytes > self.memory_limit_bytes

    @property
    def wrong(self) -> bool:
        """Whether its gradients differ from those of one process."""
        return self.difference is not None and not self.difference <= TOLERANCE


def refused(entrant: Entrant, reason: str) -> Score:
    """Returns the score of an entrant that cannot run a case."""
    return Score(entrant.name, entrant.ours, entrant.recomputes, remark=f"not run: {reason}")


@dataclass(frozen=True)
class Result:
    """A case and the scores of its entrants."""

    case: Case
    cells: tuple[int, ...]
    costs: tuple[LayerCost, ...]
    scores: tuple[Score, ...]

    @property
    def wrong(self) -> list[Score]:
        """Scores with wrong gradients."""
        return [score for score in self.scores if score.wrong]

    def best_peer(self, score: Score, alike: bool = False, within: bool = False) -> float | None:
        """Returns the median of the fastest peer with right gradients; None without one.

        ``alike``: only peers that recompute like this entrant. ``within``: only peers that need no more memory than
        this entrant, or than its limit (with a tolerance of 1%).
        """
        memory = _known(score.peak_bytes) if score.memory_limit_bytes is None else score.memory_limit_bytes
        if alike and score.recomputes is None:
            return None
        peers = [
            other.median
            for other in self.scores
            if other.ran and not other.is_ours and not other.wrong
            and (not alike or other.recomputes == score.recomputes)
            and (not within or _known(other.peak_bytes) <= 1.01 * memory < math.inf)
        ]  # fmt: skip
        return min(peers, default=None)

    def table(self) -> Table:
        """Returns the entrants, ours first, sorted by speed."""
        rows: list[list[Value]] = []
        for score in sorted(self.scores, key=lambda s: (not s.ran, not s.is_ours, s.median if s.ran else 0.0)):
            if not score.ran:
                rows.append([score.entrant, *[None] * (len(HEADINGS) - 2), score.remark])
                continue
            ratios = [
                _over(self.best_peer(score, *which), score.median)
                for which in ((False, False), (True, False), (False, True))
            ]
            mebibytes = score.peak_bytes / 2**20 if score.peak_bytes is not None else None
            remark = "WRONG GRADIENTS" if score.wrong else score.remark
            bound = None if math.isnan(score.lower_bound_s) else score.lower_bound_s
            rows.append(
                [
                    score.entrant, score.median, score.spread, *ratios, bound, _over(bound, score.median), mebibytes,
                     score.difference, remark,
                ]
            )  # fmt: skip
        return Table(self.case.name, f"Benchmark, {self.case.title}", HEADINGS, rows, self._notes())

    def _notes(self) -> list[str]:
        work, layers = self.case.work, self.costs
        where = "in fresh processes each time" if self.case.fresh_processes else "all in the same processes"
        each = [sum(getattr(cost, name) for cost in layers) / work.stages * 1e3 for name in _PARTS]
        return [
            f"{work}; cells of {', '.join(map(str, self.cells))} layers; mean costs of a stage, measured alone: "
            f"F {each[0]:.3g} ms, R {each[1]:.3g} ms, B {each[2]:.3g} ms.",
            f"{self.case.rounds} rounds of {self.case.steps} steps of each entrant in turn, {where}, one thread per "
            "process; a step is forward and backward of one mini-batch, gradients averaged over replicas, no update; "
            "its time is the slowest worker's. Spread = (slowest - fastest) / median.",
            "Speed over X = X's median / this median; above 1 this entrant is faster. Alike: the peers that "
            "recompute like it. In its memory: the peers whose peak is not above its own or its memory limit.",
            "Limit: fill-drain without message times, (M+K-1)(F+B) + (M-1)R with recompute, (M+K-1)(F+B) without, from "
            "F, R, B measured alone. Other schedules can be faster.",
            "Peak: bytes that a step allocates (activations, messages, gradients), on the stage with the highest peak.",
            f"Gradient difference: the largest over all parameters, from one process with the whole model; above "
            f"{TOLERANCE} it is wrong.",
        ]

    def record(self) -> dict[str, Any]:
        """Returns the result for JSON, with the time of every step."""
        work = self.case.work
        rows = []
        for score in self.scores:
            row: dict[str, Any] = {
                "entrant": score.entrant, "ours": score.is_ours, "recomputes": score.recomputes,
                "remark": score.remark,
            }  # fmt: skip
            if score.ran:
                row |= {
                    "rounds": score.rounds, "median_s": score.median, "spread": score.spread,
                    "over_best_peer": _over(self.best_peer(score), score.median),
                    "over_best_alike": _over(self.best_peer(score, alike=True), score.median),
                    "over_best_in_its_memory": _over(self.best_peer(score, within=True), score.median),
                    "limit_s": None if math.isnan(score.lower_bound_s) else score.lower_bound_s,
                    "peak_bytes": score.peak_bytes, "cap_bytes": score.memory_limit_bytes,
                    "simulated_s": score.simulated_s, "wrong": score.wrong,
                    "gradient_difference": score.difference if score.difference != math.inf else None,
                }  # fmt: skip
            rows.append(row)
        return {
            "name": self.case.name, "work": repr(work), "K": work.stages, "M": work.micro_batches, "R": work.replicas,
            "cells": self.cells, "rounds": self.case.rounds, "steps": self.case.steps,
            "apart": self.case.fresh_processes,
            "layers": [{name: getattr(cost, name) for name in _PARTS} for cost in self.costs], "entrants": rows,
        }  # fmt: skip


_PARTS = ("forward_s", "recompute_s", "backward_s")

HEADINGS = (
    "entrant", "step s (measured)", "spread", "speed over best peer", "over best alike", "over best in its memory",
    "limit s (computed)", "limit / step", "peak MiB (measured)", "gradient difference", "remark",
)  # fmt: skip


def _known(peak: int | None) -> float:
    return math.inf if peak is None else peak


def _over(other: float | None, own: float) -> float | None:
    return None if other is None else other / own
