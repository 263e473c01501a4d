"""How much faster one entrant is than another, from the rounds in which both ran, with a 95% interval.

Other work on the machine changes all times of a round together, so the ratio within a round varies less than the times:

    round        1     2     3            the median of the ratios, and its interval: the median of rounds drawn
    other, s   2.30  2.21  2.95           again and again with replacement (bootstrap)
    own, s     2.09  2.03  2.64
    ratio      1.10  1.09  1.12   ->  1.10 [1.09, 1.12]: ahead, because the interval is above 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FEWEST_ROUNDS = 6
"""Rounds before a ratio counts as known: the interval of fewer may be narrow by chance."""

PRECISION = 0.03
"""A ratio is known when its interval reaches at most this share of it to each side."""

_DRAWS = 4000


@dataclass(frozen=True)
class Ratio:
    """Seconds of the other entrant over the own ones: above 1 the own entrant is faster."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def margin(self) -> float:
        """The farther end of the interval, as a share of the ratio."""
        return max(self.high - self.median, self.median - self.low) / self.median

    @property
    def is_known(self) -> bool:
        """Whether there are rounds enough and the interval is narrow enough."""
        return self.rounds >= FEWEST_ROUNDS and self.margin <= PRECISION

    @property
    def verdict(self) -> str:
        """How the own entrant stands to the other: ahead or behind only where the interval excludes 1."""
        return "ahead of" if self.low > 1 else "behind" if self.high < 1 else "level with"

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of(other: Mapping[int, float], own: Mapping[int, float]) -> Ratio | None:
    """Returns the ratio of the seconds by round; None if no round has both."""
    common = sorted(other.keys() & own.keys())
    if not common:
        return None
    ratios = np.array([other[at] / own[at] for at in common])
    places = np.random.default_rng(len(ratios)).integers(len(ratios), size=(_DRAWS, len(ratios)))
    low, high = np.quantile(np.median(ratios[places], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
