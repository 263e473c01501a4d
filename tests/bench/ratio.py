"""How much faster one entrant is than another, from the rounds of a case, with a 95% interval.

Other work on the machine changes all times of a round together, so the ratio within a round varies less than the times:

    round        1     2     3     4     5     6
    other, s   2.30  2.21  2.95  2.24  2.20  2.28
    own, s     2.09  2.03  2.64  2.04  2.02  2.06
    ratio      1.10  1.09  1.12  1.10  1.09  1.11   ->  1.10 [1.09, 1.11]: ahead, because the interval is above 1

The interval is a bootstrap, from the medians of rounds drawn again and again with replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PRECISION = 0.03
"""Two entrants are level only if no end of the interval is farther from the ratio than this share of it."""

_DRAWS = 4000

_TAIL = 0.0125
"""Share of the drawn medians below the interval, and above it. It is less than 0.025 because a bootstrap of few rounds
is too narrow."""


@dataclass(frozen=True)
class Ratio:
    """Seconds of the other entrant over the own ones: above 1 the own entrant is faster."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """How the own entrant stands to the other: ahead or behind only where the interval excludes 1, level only where
        it is narrow."""
        if not self.low <= 1 <= self.high:
            return "ahead of" if self.low > 1 else "behind"
        margin = max(self.high - self.median, self.median - self.low) / self.median
        return "level with" if margin <= PRECISION else "undecided against"

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of(other: Sequence[float], own: Sequence[float]) -> Ratio:
    """Returns the ratio of the seconds of the same rounds."""
    ratios = np.divide(other, own)
    places = np.random.default_rng(len(ratios)).integers(len(ratios), size=(_DRAWS, len(ratios)))
    low, high = np.quantile(np.median(ratios[places], axis=1), (_TAIL, 1 - _TAIL))
    return Ratio(float(np.median(ratios)), float(low), float(high))
