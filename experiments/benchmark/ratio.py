"""How much faster one entrant is than another, from the rounds in which both ran, with a 95% interval.

Other work on the machine changes all times of a round together, so the ratio within a round varies less than the times:

    round        1     2     3     4     5     6
    other, s   2.30  2.21  2.95  2.24  2.20  2.28
    own, s     2.09  2.03  2.64  2.04  2.02  2.06
    ratio      1.10  1.09  1.12  1.10  1.09  1.11   ->  1.10 [1.09, 1.11]: ahead, because the interval is above 1

The interval is a bootstrap, from the medians of rounds drawn again and again with replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FEWEST_ROUNDS = 6
"""Rounds that an interval needs. With fewer, it is often too narrow."""

PRECISION = 0.03
"""A ratio is known when no end of its interval is farther from it than this share of it."""

_DRAWS = 4000

_TAIL = 0.0125
"""Share of the drawn medians below the interval, and above it. A bootstrap of few rounds is too narrow, and so is one
that ends the rounds when it is narrow. With this share, an interval of benchmarks as they are run covers the true ratio
in 91 to 95 of 100 (simulated, for noise of 1 to 5% a turn); with 0.025 it would be 89 to 93."""


@dataclass(frozen=True)
class Ratio:
    """Seconds of the other entrant over the own ones: above 1 the own entrant is faster."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def margin(self) -> float:
        """The distance of the farther end of the interval, as a share of the ratio."""
        return max(self.high - self.median, self.median - self.low) / self.median

    @property
    def has_interval(self) -> bool:
        """Whether there are enough rounds for an interval."""
        return self.rounds >= FEWEST_ROUNDS

    @property
    def is_known(self) -> bool:
        """Whether there are enough rounds and the interval is narrow enough."""
        return self.has_interval and self.margin <= PRECISION

    @property
    def verdict(self) -> str:
        """How the own entrant stands to the other: ahead or behind only where the interval excludes 1, level only where
        the ratio is known."""
        if self.has_interval and not self.low <= 1 <= self.high:
            return "ahead of" if self.low > 1 else "behind"
        return "level with" if self.is_known else "undecided against"

    def __str__(self) -> str:
        if not self.has_interval:
            return f"{self.median:.3f} ({self.rounds} rounds)"
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of(other: Mapping[int, float], own: Mapping[int, float]) -> Ratio | None:
    """Returns the ratio of the seconds by round; None if no round has both."""
    common = sorted(other.keys() & own.keys())
    if not common:
        return None
    ratios = np.array([other[number] / own[number] for number in common])
    places = np.random.default_rng(len(ratios)).integers(len(ratios), size=(_DRAWS, len(ratios)))
    low, high = np.quantile(np.median(ratios[places], axis=1), (_TAIL, 1 - _TAIL))
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
