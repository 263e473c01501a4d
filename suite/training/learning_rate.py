"""The rate of each step, as a function of the step alone.

rate  peak _        inverse_sqrt   the Transformer papers': falls with 1/sqrt(step)
          / \\__     exponential    by a factor every so many steps, in between too
         /     \\__  cosine         half a cosine down to nothing
        warm-up

Adafactor's rate is relative to the size of a parameter, and never above 1/sqrt(step).
"""

from __future__ import annotations

import math

from suite.settings import OptimizerSettings


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Returns the rate that acts in one step, counted from 0: linear up to the peak at the end of warm-up, then
    falling.

    With t = step + 1 and w warm-up steps, d decay steps and the factor f, after warm-up: ``sqrt(w/t)`` of the peak,
    ``f^((t-w)/d)``, or ``(1 + cos(pi * min(1, (t-w)/d))) / 2``. The Transformer papers' "(3.0, 40k)" for width d is the
    first with ``peak = 3.0 / sqrt(d * 40000)``.

    torch's Adafactor takes no more than ``1 / sqrt(t)`` (Shazeer and Stern, 2018). Where that bound is the lower one,
    ``decay`` changes nothing.
    """
    rate = _scheduled(step, settings)
    # bounded here, too, so that what is logged is what acts; the same expression as torch's, to the bit
    return min(rate, 1 / (step + 1) ** 0.5) if settings.name == "adafactor" else rate


def _scheduled(step: int, settings: OptimizerSettings) -> float:
    t, warmup, peak = step + 1, settings.warmup_steps, settings.learning_rate
    if t <= warmup:
        return peak * t / warmup
    if settings.decay == "inverse_sqrt":
        return peak * math.sqrt(warmup / t)
    done = (t - warmup) / settings.decay_steps
    if settings.decay == "exponential":
        return float(peak * settings.decay_factor**done)
    return peak * (1 + math.cos(math.pi * min(1.0, done))) / 2
