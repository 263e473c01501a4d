"""How far two clocks differ, with the bound of the estimate.

```
ours     begin ─────────┬───────── end       The other clock is read somewhere in between: its offset from the middle is
              request ↘   ↗ reply            wrong by half the round trip at most. The shortest of several round trips
theirs              read                     gives the best bound (Cristian, 1989).
```
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 9


@dataclass(frozen=True)
class Skew:
    """How many seconds another clock is ahead: ``offset_s`` plus or minus ``bound_s``."""

    offset_s: float
    bound_s: float

    @property
    def least_s(self) -> float:
        """The smallest difference, ahead or behind, that agrees with the measurement."""
        return max(0.0, abs(self.offset_s) - self.bound_s)

    def __str__(self) -> str:
        word = "ahead" if self.offset_s >= 0 else "behind"
        return f"{abs(self.offset_s):.3f} s {word} (+/- {self.bound_s:.3f} s)"


def skew(read: Callable[[], float]) -> Skew:
    """Returns how far the clock that ``read`` returns (seconds since 1970) is ahead of this process's."""
    skews = []
    for _ in range(ROUNDS):
        ours, begin = time.time(), time.perf_counter()
        theirs = read()
        trip = time.perf_counter() - begin
        skews.append(Skew(theirs - (ours + trip / 2), trip / 2))
    return min(skews, key=lambda skew: skew.bound_s)
