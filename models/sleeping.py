"""A layer that takes time and computes next to nothing: stands in for a real one whose time is known.

With it a pipeline of any depth runs on a few cores, because sleeping stages do not compete for them; the messages, the
schedule and the processes stay real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Sleeping(nn.Module):
    """Sleeps ``forward_s`` in each forward, a rebuild included, and ``backward_s`` in each backward; half of that, the
    part of the weights, can be put off as a matrix product's can."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(1))
        self.later: list[Callable[[], None]] | None = None
        """As ``suite.pipeline.put_off`` has it."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``weight * x``, of any shape. On the meta device, asked for shapes alone, it does not sleep."""
        result: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return result

    def sleep_for_weights(self) -> None:
        """Sleeps the part that can be put off; the gradient is zero."""
        time.sleep(self.backward_s / 2)
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)

    def reset_parameters(self) -> None:
        """The weight is one: what goes in comes out."""
        nn.init.ones_(self.weight)


class SquareLoss(nn.Module):
    """The sum of squares of what leaves the last layer: any loss will do where nothing is learned."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """x of any shape -> (objective, measure), both that sum; ``target`` is not read."""
        objective = x.square().sum()
        return objective, objective.detach()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Sleeping) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        if not x.is_meta:
            time.sleep(layer.forward_s)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (weight,), layer = ctx.saved_tensors, ctx.layer
        if layer.later is not None:
            time.sleep(layer.backward_s / 2)
            layer.later.append(layer.sleep_for_weights)
            return gradient * weight, None, None
        time.sleep(layer.backward_s)
        return gradient * weight, torch.zeros_like(weight), None
