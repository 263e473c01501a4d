"""Layers that sleep for a given time instead of computing: they replace real layers of known cost.

With them a pipeline of any depth runs on a few cores, because sleeping stages do not compete for them; messages,
schedule and processes are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class SyntheticLayer(nn.Module):
    """Sleeps ``forward_s`` in each forward, ``input_s`` for the input's gradient and ``weight_s`` for the weights'.

    The two gradients are separate nodes in autograd's graph, so a schedule that needs one of them waits for that one
    only, and the weight gradient can be deferred. Gradients are true, which reveals a wrong pipeline. ``parameters`` is
    the number of values to all-reduce between replicas.
    """

    def __init__(self, forward_s: float, input_s: float, weight_s: float, parameters: int = 1) -> None:
        super().__init__()
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.empty(parameters))
        self.gpipe_grad_queue: list[Callable[[], None]] | None = None
        """See ``suite.pipeline.runtime.weight_grad``."""
        if not self.weight.is_meta:
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``mean(weight) * x``, of any shape. It does not sleep on the meta device."""
        if not x.is_meta:
            time.sleep(self.forward_s)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # so that the first stage takes as long as the others
        delayed: Tensor = _WithBackward.apply(x, self._input_gradient)  # type: ignore[no-untyped-call]
        weight: Tensor = _WithBackward.apply(self.weight, self._weight_gradient)  # type: ignore[no-untyped-call]
        return delayed * weight.mean()

    def _input_gradient(self, gradient: Tensor) -> Tensor:
        time.sleep(self.input_s)
        return gradient

    def _weight_gradient(self, gradient: Tensor) -> Tensor | None:
        """Sleeps for the weight gradient and returns it; None where it is deferred."""
        if self.gpipe_grad_queue is not None:
            self.gpipe_grad_queue.append(lambda: self._add_for_weight(gradient))
            return None
        time.sleep(self.weight_s)
        return gradient

    def _add_for_weight(self, gradient: Tensor) -> None:
        time.sleep(self.weight_s)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient

    def reset_parameters(self) -> None:
        """Sets values near one, different in each layer, so that outputs stay about as large as inputs."""
        nn.init.uniform_(self.weight, 0.9, 1.1)
        with torch.no_grad():  # otherwise the mean of many values would be one in every layer
            self.weight.add_(torch.empty(1).uniform_(-0.1, 0.1).to(self.weight.device))


class SquareError(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """x and target of any shapes that broadcast -> (objective, measure)."""
        objective = (x - target).square().sum()
        return objective, objective.detach()


class _WithBackward(torch.autograd.Function):
    """The identity, whose backward is a function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_gradient: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.of_gradient = of_gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.of_gradient(gradient), None
