"""The update rule: the learning rate of a step, the optimizer, and the state that it keeps of each parameter.

rate  peak _        inverse_sqrt   1/sqrt(step), as in the Transformer papers
          / \\__     exponential    a factor every lr_decay_steps, applied continuously
         /     \\__  cosine         a half cosine down to 0
        warm-up     linear         a line down to 0
                    constant       the peak
                    wsd            the peak for lr_stable_steps, then a line down to 0

Adafactor's rate is relative to the size of a parameter and never above 1/sqrt(step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from suite.settings import OptimizerSettings
from suite.training.adafactor import Adafactor

Key = tuple[int, str]
"""A parameter's layer and name."""

UpdateFactors = Callable[[str, nn.Parameter], tuple[float, float]]
"""Returns the factors of the learning rate and of the weight decay for a parameter named as in ``nn.Sequential``."""


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Returns the learning rate of a step, counted from 0: a linear warm-up to the peak, then the decay.

    With t = step + 1, w warm-up steps, d decay steps and decay factor f, after warm-up: the peak times ``sqrt(w/t)``,
    ``f^((t-w)/d)``, ``(1 + cos(pi * min(1, (t-w)/d))) / 2``, ``1 - min(1, (t-w)/d)``, or 1. After s stable steps, wsd
    is the line with ``w + s`` for w. The Transformer papers' "(3.0, 40k)" for width d is the first with
    ``peak = 3.0 / sqrt(d * 40000)``.

    Adafactor caps the rate at ``1 / sqrt(t)`` (Shazeer and Stern, 2018). Where the cap is lower, ``lr_decay``
    has no effect.
    """
    rate = _scheduled(step, settings)
    # capped here as well, by Adafactor's own expression, so that the logged rate is the applied rate to the bit
    return min(rate, 1 / (step + 1) ** 0.5) if settings.name == "adafactor" else rate


def _scheduled(step: int, settings: OptimizerSettings) -> float:
    t, warmup, peak = step + 1, settings.warmup_steps, settings.learning_rate
    if t <= warmup:
        return peak * t / warmup
    if settings.lr_decay == "constant":
        return peak
    if settings.lr_decay == "inverse_sqrt":
        return peak * math.sqrt(warmup / t)
    stable = settings.lr_stable_steps if settings.lr_decay == "wsd" else 0
    periods = max(0, t - warmup - stable) / settings.lr_decay_steps
    if settings.lr_decay == "exponential":
        return float(peak * settings.lr_decay_factor**periods)
    if settings.lr_decay == "cosine":
        return peak * (1 + math.cos(math.pi * min(1.0, periods))) / 2
    return peak * (1 - min(1.0, periods))


def scaled_start_factors(scale: float, settings: OptimizerSettings) -> tuple[float, float]:
    """Returns the factors of the learning rate and of the weight decay of a parameter that starts ``scale`` times as
    large as usual, so that it moves equally far relative to its size.

    Training is then the same as with a parameter of usual size whose product is multiplied by ``scale``, but for the
    norm of the gradients. Without factors a step of AdamW and RMSProp is as long as the rate; one of SGD follows the
    gradient, which is ``1/scale`` times as large; one of Adafactor follows the parameter, down to a root mean square of
    1e-3. RMSProp and SGD add the decay to the gradient, the others take it from the parameter.
    """
    return {
        "adamw": (scale, 1 / scale),
        "adafactor": (1.0, 1.0),
        "rmsprop": (scale, 1 / scale**2),
        "sgd": (scale**2, 1 / scale**2),
    }[settings.name]


def param_groups(
    parameters: Mapping[Key, nn.Parameter], factors: Mapping[Key, tuple[float, float]], settings: OptimizerSettings
) -> list[dict[str, Any]]:
    """Returns torch's parameter groups, one for each pair of factors; ``lr_factor`` is that of the learning rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for key, parameter in parameters.items():
        groups.setdefault(factors[key], []).append(parameter)
    return [
        {"params": group, "lr_factor": lr_factor, "weight_decay": settings.weight_decay * decay_factor}
        for (lr_factor, decay_factor), group in groups.items()
    ]


def make_optimizer(
    parameters: list[nn.Parameter] | list[dict[str, Any]], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """Returns the optimizer of these parameters, or groups of them: torch's, or Adafactor in batches."""
    common: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.name == "adafactor":
        return Adafactor(parameters, **common)  # it clips updates, whatever max_grad_norm is
    if settings.name == "rmsprop":
        return torch.optim.RMSprop(
            parameters, alpha=settings.beta2, eps=settings.epsilon, momentum=settings.beta1, **common
        )
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.beta1, fused=True, **common)
    betas = settings.beta1, settings.beta2
    return torch.optim.AdamW(parameters, betas=betas, eps=settings.epsilon, fused=True, **common)


def state_shapes(shape: tuple[int, ...], settings: OptimizerSettings) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the state of a parameter of this shape."""
    if settings.name == "sgd":  # counts no steps
        return dict.fromkeys(settings.state_names, shape)
    if names := settings.state_names:
        return {**dict.fromkeys(names, shape), "step": ()}
    if len(shape) > 1:
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1]), "step": ()}
    return {"variance": shape, "step": ()}
