"""The evaluation of a benchmark case: who is how much faster than whom, with intervals.

The time of a step is that of its slowest worker. The gradients of one step are compared with those of one process that
has the whole model.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any, Literal

from suite.pipeline.planning.costs import LayerCost
from tests.bench.cases import Case
from tests.bench.ratio import Ratio, ratio_of

TOLERANCE = 1e-4
"""Largest allowed relative difference of a gradient from one process's; fp32 sums in another order."""

PARTS = ("forward_s", "recompute_s", "backward_s")

Kind = Literal["all", "alike", "in its memory"]
KINDS: tuple[Kind, ...] = ("all", "alike", "in its memory")
"""The peers that an entrant is compared with: all with right gradients; of these, those that recompute like it; those
that need at most 1% more memory than it does, or than the limit of its plan."""


@dataclass(frozen=True)
class Score:
    entrant: str
    is_ours: bool
    recomputes: bool | None
    """None: only some micro-batches are recomputed."""
    rounds: tuple[tuple[float, ...], ...] = ()
    """Seconds of each step, on the slowest worker, by round; empty if it did not run."""
    peak_bytes: int = 0
    """Peak bytes that a step allocates, on the stage with the highest peak."""
    difference: float = 0.0
    """Largest relative difference of a parameter's gradient from one process's; infinite if one is missing."""
    ideal_s: float | None = None
    """Seconds of an ideal fill-drain step (``tests.bench.cases.ideal_fill_drain_s``)."""
    memory_limit_bytes: int | None = None
    """The memory limit of its plan in bytes."""
    simulated_s: float | None = None
    remark: str = ""

    @property
    def median(self) -> float:
        return statistics.median(second for steps in self.rounds for second in steps)

    @property
    def over_memory_limit(self) -> bool:
        return self.memory_limit_bytes is not None and self.peak_bytes > self.memory_limit_bytes

    @property
    def wrong(self) -> bool:
        return self.difference > TOLERANCE

    def over(self, peer: Score) -> Ratio:
        """Returns the ratio of the peer's seconds to its own."""
        return ratio_of(*([statistics.median(steps) for steps in each.rounds] for each in (peer, self)))


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
        return sorted((s for s in self.scores if s.rounds and s.is_ours and not s.wrong), key=lambda s: s.median)

    @property
    def wrong(self) -> list[Score]:
        return [score for score in self.scores if score.wrong]

    def compared(self, score: Score, kind: Kind) -> list[tuple[Score, Ratio]]:
        """Returns the peers of a kind with the ratio of their seconds to this entrant's, the fastest first."""
        limit = score.peak_bytes if score.memory_limit_bytes is None else score.memory_limit_bytes
        found = [
            (peer, score.over(peer))
            for peer in self.scores
            if peer.rounds
            and not peer.is_ours
            and not peer.wrong
            and (kind != "alike" or peer.recomputes == score.recomputes)
            and (kind != "in its memory" or peer.peak_bytes <= 1.01 * limit)
        ]
        return sorted(found, key=lambda pair: pair[1].median)

    def best(self, score: Score, kind: Kind) -> tuple[Score, Ratio] | None:
        """Returns the fastest peer of a kind and its ratio; None without one."""
        return next(iter(self.compared(score, kind)), None)

    def record(self) -> dict[str, Any]:
        work = self.case.work
        return {
            "name": self.case.name,
            "work": repr(work),
            "K": work.stages,
            "M": work.micro_batches,
            "R": work.replicas,
            "cells": self.cells,
            "steps_of_a_turn": self.case.steps,
            "own_processes": self.case.own_processes,
            "layers": [{name: getattr(cost, name) for name in PARTS} for cost in self.costs],
            "entrants": [self._record_of(score) for score in self.scores],
        }

    def _record_of(self, score: Score) -> dict[str, Any]:
        row = {**asdict(score), "difference": score.difference if math.isfinite(score.difference) else None}
        if not score.rounds:
            return row
        over = {kind: best for kind in KINDS if score.is_ours and (best := self.best(score, kind)) is not None}
        return row | {
            "median_s": score.median,
            "wrong": score.wrong,
            "over_best": {kind: {"peer": peer.entrant, **asdict(ratio)} for kind, (peer, ratio) in over.items()},
        }
