"""The evaluation of a benchmark case: who is how much faster than whom, with intervals, and who must run again.

The time of a step is that of its slowest worker. The gradients of one step are compared with those of one process that
has the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from experiments.benchmark.cases import Case
from experiments.benchmark.peers.peer import Entrant
from experiments.benchmark.ratio import Ratio, ratio_of
from suite.pipeline.planning.costs import LayerCost

TOLERANCE = 1e-4
"""Largest allowed relative difference of a gradient from one process's; fp32 sums in another order."""

CLOSE = 1.2
"""A peer runs on if it is at most this many times slower than the fastest: until its ratio has an interval, or, if it
recomputes alike, until the ratio is known."""

PARTS = ("forward_s", "recompute_s", "backward_s")

Kind = Literal["all", "alike", "in its memory"]
KINDS: tuple[Kind, ...] = ("all", "alike", "in its memory")
"""The peers that an entrant is compared with: all with right gradients; of these, those that recompute like it; those
that need at most 1% more memory than it does, or than the limit of its plan."""


@dataclass(frozen=True)
class Score:
    """The result of one entrant in one case."""

    entrant: str
    is_ours: bool
    recomputes: bool | None
    """None: only some micro-batches are recomputed."""
    seconds_by_round: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of each step, on the slowest worker."""
    peak_bytes: int | None = None
    """Peak bytes that a step allocates, on the stage with the highest peak."""
    difference: float | None = None
    """Largest relative difference of a parameter's gradient from one process's; infinite if one is missing."""
    ideal_s: float = math.nan
    """Seconds of an ideal fill-drain step (``experiments.benchmark.cases.ideal_fill_drain_s``)."""
    memory_limit_bytes: int | None = None
    """The memory limit of its plan in bytes."""
    simulated_s: float | None = None
    remark: str = ""

    @property
    def ran(self) -> bool:
        """Whether it has any measured steps."""
        return bool(self.seconds_by_round)

    @property
    def step_by_round(self) -> dict[int, float]:
        """Median seconds of a step, by round."""
        return {number: statistics.median(steps) for number, steps in self.seconds_by_round.items()}

    @property
    def median(self) -> float:
        """Median of the steps' seconds."""
        return statistics.median(second for steps in self.seconds_by_round.values() for second in steps)

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
    def ours(self) -> list[Score]:
        """The suite's entrants with right gradients, the fastest first."""
        return sorted((s for s in self.scores if s.ran and s.is_ours and not s.wrong), key=lambda s: s.median)

    @property
    def wrong(self) -> list[Score]:
        """Scores with wrong gradients."""
        return [score for score in self.scores if score.wrong]

    def with_round(self, number: int, seconds: Mapping[str, tuple[float, ...]]) -> Result:
        """Returns the result with another round: the seconds of each step, by entrant."""
        scores = tuple(
            replace(score, seconds_by_round={**score.seconds_by_round, number: seconds[score.entrant]})
            if score.entrant in seconds
            else score
            for score in self.scores
        )
        return replace(self, scores=scores)

    def compared(self, score: Score, kind: Kind) -> list[tuple[Score, Ratio]]:
        """Returns the peers of a kind with the ratio of their seconds to this entrant's, the fastest first."""
        if kind == "alike" and score.recomputes is None:
            return []
        memory = _known(score.peak_bytes) if score.memory_limit_bytes is None else score.memory_limit_bytes
        found = [
            (peer, ratio)
            for peer in self.scores
            if not peer.is_ours and not peer.wrong
            and (kind != "alike" or peer.recomputes == score.recomputes)
            and (kind != "in its memory" or _known(peer.peak_bytes) <= 1.01 * memory < math.inf)
            and (ratio := ratio_of(peer.step_by_round, score.step_by_round)) is not None
        ]  # fmt: skip
        return sorted(found, key=lambda pair: pair[1].median)

    def best(self, score: Score, kind: Kind) -> tuple[Score, Ratio] | None:
        """Returns the fastest peer of a kind and its ratio; None without one."""
        return next(iter(self.compared(score, kind)), None)

    def comparisons(self) -> Iterator[tuple[Score, Score, Ratio]]:
        """Yields ours, a peer and their ratio for each comparison that must be known: with every peer that may be the
        fastest of its kind, and with close ones that recompute alike."""
        for score in self.ours:
            for kind in KINDS:
                found = self.compared(score, kind)
                for peer, ratio in found:
                    is_close = ratio.median <= CLOSE * found[0][1].median
                    if ratio.low <= found[0][1].high or (is_close and (kind == "alike" or not ratio.has_interval)):
                        yield score, peer, ratio

    @property
    def needed(self) -> set[str]:
        """Entrants whose next turn can decide a comparison."""
        return {name for pair in self.open_pairs for name in pair}

    @property
    def open_pairs(self) -> set[tuple[str, str]]:
        """Ours and a peer, for each comparison whose ratio is not known yet."""
        return {(ours.entrant, peer.entrant) for ours, peer, ratio in self.comparisons() if not ratio.is_known}

    def record(self) -> dict[str, Any]:
        """Returns the result for JSON, with the time of every step."""
        work = self.case.work
        return {
            "name": self.case.name, "work": repr(work), "K": work.stages, "M": work.micro_batches, "R": work.replicas,
            "cells": self.cells, "steps_of_a_turn": self.case.steps, "own_processes": self.case.own_processes,
            "layers": [{name: getattr(cost, name) for name in PARTS} for cost in self.costs],
            "entrants": [self._record_of(score) for score in self.scores],
        }  # fmt: skip

    def _record_of(self, score: Score) -> dict[str, Any]:
        row: dict[str, Any] = {
            "entrant": score.entrant, "ours": score.is_ours, "recomputes": score.recomputes, "remark": score.remark,
        }  # fmt: skip
        if not score.ran:
            return row
        over = {kind: self.best(score, kind) for kind in KINDS} if score.is_ours else {}
        return row | {
            "seconds_by_round": {str(number): list(steps) for number, steps in score.seconds_by_round.items()},
            "median_s": score.median,
            "over_best": {
                kind: {"peer": found[0].entrant, **asdict(found[1])}
                for kind, found in over.items()
                if found is not None
            },
            "ideal_s": None if math.isnan(score.ideal_s) else score.ideal_s,
            "peak_bytes": score.peak_bytes, "memory_limit_bytes": score.memory_limit_bytes,
            "simulated_s": score.simulated_s, "wrong": score.wrong,
            "gradient_difference": score.difference if score.difference != math.inf else None,
        }  # fmt: skip


def _known(peak: int | None) -> float:
    return math.inf if peak is None else peak
