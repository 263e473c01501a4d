"""Numbers as text, with the digits that mean something."""

from __future__ import annotations

import math


def in_seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def in_figures(value: float) -> str:
    """Returns a number with at least two significant figures, such as 0.042, 3.1, 47 or 1,200."""
    if value >= 10 or value <= 0:
        return f"{value:,.0f}"
    digits = 1 - math.floor(math.log10(value))
    return f"{value:.{digits}f}"


def in_hours(seconds: float) -> str:
    """Returns a duration in hours, or in minutes or seconds if it is short."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.2f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else in_seconds(seconds)


def in_hour_interval(low_s: float, high_s: float) -> str:
    """Returns two durations as an interval, in hours without false digits."""
    if low_s >= 3600:
        return f"{in_figures(low_s / 3600)} to {in_figures(high_s / 3600)} hours"
    return f"{in_hours(low_s)} to {in_hours(high_s)}"
