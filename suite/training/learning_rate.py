"""The learning rate as a function of the step.

rate  peak _        inverse_sqrt   1/sqrt(step), as in the Transformer papers
          / \\__     exponential    a factor every lr_decay_steps, applied continuously
         /     \\__  cosine         a half cosine down to 0
        warm-up

Adafactor's rate is relative to the size of a parameter and never above 1/sqrt(step).
"""

from __future__ import annotations

import math

from suite.settings import OptimizerSettings


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Returns the learning rate of a step, counted from 0: a linear warm-up to the peak, then the decay.

    With t = step + 1, w warm-up steps, d decay steps and decay factor f, after warm-up: the peak times ``sqrt(w/t)``,
    ``f^((t-w)/d)``, or ``(1 + cos(pi * min(1, (t-w)/d))) / 2``. The Transformer papers' "(3.0, 40k)" for width d is the
    first with ``peak = 3.0 / sqrt(d * 40000)``.

    torch's Adafactor caps the rate at ``1 / sqrt(t)`` (Shazeer and Stern, 2018). Where the cap is lower, ``lr_decay``
    has no effect.
    """
    rate = _scheduled(step, settings)
    # capped here as well, by torch's own expression, so that the logged rate is the applied rate to the bit
    return min(rate, 1 / (step + 1) ** 0.5) if settings.name == "adafactor" else rate


def _scheduled(step: int, settings: OptimizerSettings) -> float:
    t, warmup, peak = step + 1, settings.warmup_steps, settings.learning_rate
    if t <= warmup:
        return peak * t / warmup
    if settings.lr_decay == "inverse_sqrt":
        return peak * math.sqrt(warmup / t)
    periods = (t - warmup) / settings.lr_decay_steps
    if settings.lr_decay == "exponential":
        return float(peak * settings.lr_decay_factor**periods)
    return peak * (1 + math.cos(math.pi * min(1.0, periods))) / 2
