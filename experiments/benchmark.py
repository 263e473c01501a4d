"""The suite beside its peers on the same work: which cases there are, and what is made of their times.

Contenders are interleaved: each round runs every one in turn, the order moved on from round to round. Where only sleep
takes time they share their processes; where something is computed each turn has fresh ones, as the memory of twenty
others that stand beside a contender slows it by a tenth. A step's time is its slowest worker's. One step each is held
against the gradients of one process that has the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.peers.peer import Contender
from experiments.peers.work import Blocks, Sentences, Sleepers, Work
from experiments.table import Table, Value
from suite.errors import SettingError, nearest
from suite.pipeline.costs import LayerCost
from suite.pipeline.partition import cell_ranges
from suite.pipeline.rebuild import GRAPHS
from suite.pipeline.recipe import Recipe
from suite.pipeline.simulate import StageCost, simulate

TOLERANCE = 1e-4
"""Largest difference of a gradient from one process's, as a share of its largest value: fp32 sums in another order."""


@dataclass(frozen=True)
class Case:
    """One table of the benchmark."""

    work: Work
    rounds: int = 3
    steps: int = 1
    """Of each contender in a round."""
    warm_ups: int = 0
    """Steps before these that are not counted: a training run's step follows one of its own, and finds the memory as
    that left it."""
    apart: bool = False
    """Whether each contender's turn has fresh processes."""

    @property
    def name(self) -> str:
        """Of its files and its table."""
        work = self.work
        replicas = f"-r{work.replicas}" if work.replicas > 1 else ""
        return f"bench-{work.name}-k{work.stages}-m{work.micro_batches}{replicas}"

    @property
    def title(self) -> str:
        """For people."""
        work = self.work
        replicas = f", R = {work.replicas}" if work.replicas > 1 else ""
        return f"{work.name}: K = {work.stages}, M = {work.micro_batches}{replicas}"


CASES: dict[str, tuple[Case, ...]] = {
    "sleeping": (
        *(Case(Sleepers(k, m)) for k, m in ((2, 8), (4, 8), (8, 8), (8, 32))),
        Case(Sleepers(16, 64), rounds=2),  # more than a minute a round
    ),
    "layers": (Case(Blocks(2, 8), warm_ups=1, apart=True),),
    "translation": (Case(Sentences(2, 8), steps=2, warm_ups=1, apart=True),),
    "replicas": (Case(Sleepers(2, 8, replicas=2, parameters=1 << 20)),),
}


def cases(name: str) -> tuple[Case, ...]:
    """Returns the cases asked for by a name, or by ``all``. Raises SettingError for another name."""
    if name == "all":
        return tuple(case for some in CASES.values() for case in some)
    if name not in CASES:
        raise SettingError(f"no benchmark is called {name!r}; {nearest(name, [*CASES, 'all'])}")
    return CASES[name]


def order(count: int, at: int, rounds: int) -> list[int]:
    """Returns who runs when in round ``at``: moved on so far that over all rounds everybody is early and late."""
    first = at * count // max(1, rounds)
    return [(first + place) % count for place in range(count)]


def limit(costs: Sequence[LayerCost], cells: Sequence[int], micro_batches: int, rebuilds: bool) -> float:
    """Returns what a fill-drain step takes whose messages take no time: over equal stages

    (M+K-1)(F+B) + (M-1)R with early rebuild, (M+K-1)(F+B) without; over unequal ones the schedule is played.
    """
    stages = []
    for cell in cell_ranges(cells, len(costs)):
        mine = [costs[index] for index in cell]
        forward, rebuild, backward = (
            sum(getattr(cost, name) for cost in mine) for name in ("forward_s", "rebuild_s", "backward_s")
        )
        stages.append(StageCost(forward, rebuild, backward))
    recipe = Recipe(graphs=(GRAPHS["except_last" if rebuilds else "never"],))
    return simulate(recipe.actions(len(cells), micro_batches), stages).seconds


@dataclass(frozen=True)
class Score:
    """What was found of one contender in one case."""

    contender: str
    ours: bool
    rebuilds: bool | None
    """None: some micro-batches are rebuilt and some are not."""
    rounds: tuple[tuple[float, ...], ...] = ()
    """Seconds of each step of each round, of the slowest worker."""
    peak: int | None = None
    """Bytes that a step allocates at its peak, on the stage that needs most."""
    difference: float | None = None
    """Largest relative difference of a parameter's gradient from one process's; infinite if one is missing."""
    limit_s: float = math.nan
    cap: int | None = None
    """Bytes that it was planned to keep to."""
    simulated_s: float | None = None
    remark: str = ""

    @property
    def ran(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.rounds)

    @property
    def seconds(self) -> list[float]:
        """Of all steps."""
        return [second for some in self.rounds for second in some]

    @property
    def median(self) -> float:
        """Of the steps."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    @property
    def over(self) -> bool:
        """Whether it took more memory than it was planned to keep to."""
        return self.cap is not None and self.peak is not None and self.peak > self.cap

    @property
    def wrong(self) -> bool:
        """Whether its gradients are not those of one process."""
        return self.difference is not None and not self.difference <= TOLERANCE


def refused(contender: Contender, reason: str) -> Score:
    """Returns the row of one that cannot do a work."""
    return Score(contender.name, contender.ours, contender.rebuilds, remark=f"not run: {reason}")


@dataclass(frozen=True)
class Result:
    """A case and what was found in it."""

    case: Case
    cells: tuple[int, ...]
    costs: tuple[LayerCost, ...]
    scores: tuple[Score, ...]

    @property
    def wrong(self) -> list[Score]:
        """Those whose gradients are wrong."""
        return [score for score in self.scores if score.wrong]

    def best_peer(self, score: Score, alike: bool = False, within: bool = False) -> float | None:
        """Returns the median of the fastest peer whose gradients are right, or None where there is none.

        ``alike``: of those that rebuild too, or that do not either. ``within``: of those that need no more memory than
        this one, or than it was planned to keep to (a hundredth more is no more).
        """
        room = _known(score.peak) if score.cap is None else score.cap
        if alike and score.rebuilds is None:
            return None
        peers = [
            other.median
            for other in self.scores
            if other.ran and not other.ours and not other.wrong
            and (not alike or other.rebuilds == score.rebuilds)
            and (not within or _known(other.peak) <= 1.01 * room < math.inf)
        ]  # fmt: skip
        return min(peers, default=None)

    def table(self) -> Table:
        """Returns the contenders, ours first, the faster before the slower."""
        rows: list[list[Value]] = []
        for score in sorted(self.scores, key=lambda one: (not one.ran, not one.ours, one.median if one.ran else 0.0)):
            if not score.ran:
                rows.append([score.contender, *[None] * (len(HEADINGS) - 2), score.remark])
                continue
            ratios = [
                _over(self.best_peer(score, *which), score.median)
                for which in ((False, False), (True, False), (False, True))
            ]
            mebibytes = score.peak / 2**20 if score.peak is not None else None
            remark = "WRONG GRADIENTS" if score.wrong else score.remark
            bound = None if math.isnan(score.limit_s) else score.limit_s
            rows.append(
                [
                    score.contender, score.median, score.spread, *ratios, bound, _over(bound, score.median), mebibytes,
                     score.difference, remark,
                ]
            )  # fmt: skip
        return Table(self.case.name, f"Benchmark, {self.case.title}", HEADINGS, rows, self._notes())

    def _notes(self) -> list[str]:
        work, layers = self.case.work, self.costs
        where = "in fresh processes each time" if self.case.apart else "all in the same processes"
        each = [sum(getattr(cost, name) for cost in layers) / work.stages * 1e3 for name in _PARTS]
        return [
            f"{work}; cells of {', '.join(map(str, self.cells))} layers; a stage in the mean, measured alone: "
            f"F {each[0]:.3g} ms, R {each[1]:.3g} ms, B {each[2]:.3g} ms.",
            f"{self.case.rounds} rounds of {self.case.steps} steps of each contender in turn, {where}, one thread a "
            "process; a step is forward and backward of one mini-batch, gradients averaged over replicas, no update; "
            "its time is the slowest worker's. Spread = (slowest - fastest) / median.",
            "Speed over X = X's median / this median, above 1 where this is faster. Alike: of the peers that rebuild "
            "too, or that do not either. In its memory: of the peers whose peak is no higher than its own, or than the "
            "bytes that it was planned to keep to.",
            "Limit: fill-drain whose messages take no time, (M+K-1)(F+B) + (M-1)R with rebuild, (M+K-1)(F+B) without, "
            "from F, R, B measured alone. Other schedules may go below it.",
            "Peak: bytes that a step allocates over what stood before it (activations, messages, gradients), on the "
            "stage that needs most.",
            f"Gradient difference: largest of all parameters, from one process with the whole model; above {TOLERANCE} "
            "it is wrong.",
        ]

    def record(self) -> dict[str, Any]:
        """Returns all of it, every step's time included, for JSON."""
        work = self.case.work
        rows = []
        for score in self.scores:
            row: dict[str, Any] = {
                "contender": score.contender, "ours": score.ours, "rebuilds": score.rebuilds, "remark": score.remark,
            }  # fmt: skip
            if score.ran:
                row |= {
                    "rounds": score.rounds, "median_s": score.median, "spread": score.spread,
                    "over_best_peer": _over(self.best_peer(score), score.median),
                    "over_best_alike": _over(self.best_peer(score, alike=True), score.median),
                    "over_best_in_its_memory": _over(self.best_peer(score, within=True), score.median),
                    "limit_s": None if math.isnan(score.limit_s) else score.limit_s,
                    "peak_bytes": score.peak, "cap_bytes": score.cap, "simulated_s": score.simulated_s,
                    "wrong": score.wrong,
                    "gradient_difference": score.difference if score.difference != math.inf else None,
                }  # fmt: skip
            rows.append(row)
        return {
            "name": self.case.name, "work": repr(work), "K": work.stages, "M": work.micro_batches, "R": work.replicas,
            "cells": self.cells, "rounds": self.case.rounds, "steps": self.case.steps,
            "apart": self.case.apart,
            "layers": [{name: getattr(cost, name) for name in _PARTS} for cost in self.costs], "contenders": rows,
        }  # fmt: skip


_PARTS = ("forward_s", "rebuild_s", "backward_s")

HEADINGS = (
    "contender", "step s (measured)", "spread", "speed over best peer", "over best alike", "over best in its memory",
    "limit s (computed)", "limit / step", "peak MiB (measured)", "gradient difference", "remark",
)  # fmt: skip


def _known(peak: int | None) -> float:
    return math.inf if peak is None else peak


def _over(other: float | None, mine: float) -> float | None:
    return None if other is None else other / mine
