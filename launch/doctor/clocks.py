"""How far two clocks differ, with the bound of the estimate.

```
ours     begin ─────────┬───────── end       The other clock was read somewhere between: its offset from the middle is
                 asks ↘   ↗ answers          wrong by half the round trip at most. The shortest of some round trips
theirs              read                     bounds it best (Cristian, 1989).
```
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 9


@dataclass(frozen=True)
class Skew:
    """How many seconds another clock is ahead; it lies within ``offset_s`` plus or minus ``bound_s``."""

    offset_s: float
    bound_s: float

    @property
    def least_s(self) -> float:
        """The smallest difference, ahead or behind, that agrees with what was seen."""
        return max(0.0, abs(self.offset_s) - self.bound_s)

    def __str__(self) -> str:
        word = "ahead" if self.offset_s >= 0 else "behind"
        return f"{abs(self.offset_s):.3f} s {word}, give or take {self.bound_s:.3f} s"


def skew(
    read: Callable[[], float],
    rounds: int = ROUNDS,
    wall: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.perf_counter,
) -> Skew:
    """Returns how far the clock that ``read`` asks (seconds since 1970) is ahead of ``wall``; round trips are timed by
    the ``steady`` clock, which nobody sets."""
    found = []
    for _ in range(rounds):
        ours, begin = wall(), steady()
        theirs = read()
        trip = steady() - begin
        found.append(Skew(theirs - (ours + trip / 2), trip / 2))
    return min(found, key=lambda one: one.bound_s)
