"""The rate of each step, as a function of the step alone.

rate  peak _        inverse_sqrt   the Transformer papers': falls with 1/sqrt(step)
          / \\__     exponential    by a factor every so many steps, in between too
         /     \\__  cosine         half a cosine down to nothing
        warm-up
"""

from __future__ import annotations

import math

from suite.settings import OptimizerSettings


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Returns the rate of one step, counted from 0: linear up to the peak at the end of warm-up, then falling.

    With t = step + 1 and w warm-up steps, d decay steps and the factor f, after warm-up: ``sqrt(w/t)`` of the peak,
    ``f^((t-w)/d)``, or ``(1 + cos(pi * min(1, (t-w)/d))) / 2``. The Transformer papers' "(3.0, 40k)" for width d is the
    first with ``peak = 3.0 / sqrt(d * 40000)``.
    """
    t, warmup, peak = step + 1, settings.warmup_steps, settings.learning_rate
    if t <= warmup:
        return peak * t / warmup
    if settings.decay == "inverse_sqrt":
        return peak * math.sqrt(warmup / t)
    done = (t - warmup) / settings.decay_steps
    if settings.decay == "exponential":
        return float(peak * settings.decay_factor**done)
    return peak * (1 + math.cos(math.pi * min(1.0, done))) / 2
