"""Means over seeds with their margins: Student's t at 95%."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

from experiments.report.table import readable

Outcome = Literal["confirmed", "contradicted", "undecided", "no runs"]


@dataclass(frozen=True)
class Difference:
    """The difference of two means, and its margin of error."""

    value: float
    margin: float | None
    """None if nothing has two seeds."""

    def __str__(self) -> str:
        return f"{self.value:+.2f}" + (f" ± {self.margin:.2f}" if self.margin is not None else " (one seed)")

    @property
    def outcome(self) -> Outcome:
        """The verdict on the finding that the difference is above 0."""
        if self.margin is None or not abs(self.value) > self.margin:  # so is one that is not finite
            return "undecided"
        return "confirmed" if self.value > 0 else "contradicted"


def difference(more: Sequence[float], less: Sequence[float], spread: Iterable[Sequence[float]]) -> Difference | None:
    """Returns mean(more) - mean(less), values by seed, with the margin from all groups in ``spread``."""
    if not more or not less:
        return None
    groups = [group for group in spread if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    value = statistics.fmean(more) - statistics.fmean(less)
    if not freedom:
        return Difference(value, None)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in groups)
    return Difference(value, t95(freedom) * math.sqrt(squares / freedom * (1 / len(more) + 1 / len(less))))


def t95(freedom: int) -> float:
    """Returns Student's t, two-sided 95%."""
    return float(stdtrit(freedom, 0.975))


def t_margin(values: Sequence[float]) -> float:
    """Returns the half-width of the 95% confidence interval of a mean, t * s / sqrt(n); 0 for one value."""
    if len(values) < 2:
        return 0.0
    return t95(len(values) - 1) * math.sqrt(statistics.variance(values) / len(values))


def mean_and_margin(values: Sequence[float]) -> str | None:
    """Returns ``mean ± margin``; only the mean of one value, None for none."""
    if not values:
        return None
    mean = readable(float(statistics.fmean(values)))
    return mean if len(values) == 1 else f"{mean} ± {t_margin(values):.2g}"
