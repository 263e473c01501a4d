"""Weights' gradients put off: a backward that makes only what the stage before waits for, and the rest later.

    y = x W'           B:  dx = dy W      to the stage before, at once
                       W:  dW = dy' x     whenever there is time; x and dy are held until then

Nothing is computed twice, because a layer's two products are apart. ``nn.Linear``, where the weights of a Transformer
are, is taken apart here. Any other module can be: it has an attribute ``later``, a list while gradients may be put off
and None otherwise, and its backward appends calls to it that add them to ``.grad``. What does neither makes its
weights' gradients in ``B``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Later = list[Callable[[], None]]
"""Calls that add what was put off to the parameters' gradients, in order."""


def splitting(layer: nn.Module) -> nn.Module:
    """Returns the layer with every linear module in it made one that can put off its gradients, of the same values."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
            cast(SplitLinear, module).later = None
    return layer


class Splits:
    """The modules of one cell that can put off gradients."""

    def __init__(self, cell: nn.Module) -> None:
        self._modules: list[Any] = [module for module in cell.modules() if hasattr(module, "later")]

    def collect(self, backward: Callable[[], None]) -> Later:
        """Runs a backward and returns what it put off."""
        later: Later = []
        for module in self._modules:
            module.later = later
        try:
            backward()
        finally:
            for module in self._modules:
                module.later = None
        return later


class SplitLinear(nn.Linear):
    """``nn.Linear`` that can put off its gradients."""

    later: Later | None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        rows: Tensor = _SplitLinear.apply(x.reshape(-1, self.in_features), self.weight, self.bias, self)
        return rows.view(*x.shape[:-1], self.out_features)


class _SplitLinear(torch.autograd.Function):
    """Of rows (N, in) -> (N, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: SplitLinear) -> Tensor:
        kind = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
        ctx.module, ctx.arrived = module, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            x, factor = x.to(kind), weight.to(kind)
            ctx.save_for_backward(x, factor)
            return F.linear(x, factor, None if bias is None else bias.to(kind))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, factor = ctx.saved_tensors
        module: SplitLinear = ctx.module
        onward = (gradient @ factor).to(ctx.arrived) if ctx.needs_input_grad[0] else None
        if module.later is None:
            weight, bias = _gradients(module, x, gradient)
            return onward, weight, bias, None
        module.later.append(lambda: _add(module, x, gradient))
        return onward, None, None, None


def _gradients(module: SplitLinear, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns those of weight and bias, from rows (N, in) and gradients (N, out)."""
    bias = None if module.bias is None else gradient.sum(0).to(module.bias.dtype)
    return (gradient.t() @ x).to(module.weight.dtype), bias


@torch.no_grad()
def _add(module: SplitLinear, x: Tensor, gradient: Tensor) -> None:
    weight, bias = _gradients(module, x, gradient)
    for parameter, summand in ((module.weight, weight), (module.bias, bias)):
        if parameter is None or summand is None:
            continue
        if parameter.grad is None:
            parameter.grad = summand
        else:
            parameter.grad += summand
