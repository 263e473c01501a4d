"""The inverse-square-root schedule of the Transformer papers, as a function of the step alone."""

from __future__ import annotations

import math


def learning_rate(step: int, peak: float, warmup_steps: int) -> float:
    """Returns the rate of one step, counted from 0: linear up to ``peak``, then falling with 1/sqrt(step).

    With t = step + 1 and w warm-up steps: ``peak * min(t/w, sqrt(w/t))``. The papers' "(3.0, 40k)" for width d is
    ``peak = 3.0 / sqrt(d * 40000)``.
    """
    t = step + 1
    return peak * min(t / warmup_steps, math.sqrt(warmup_steps / t))
