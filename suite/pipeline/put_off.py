"""Weights' gradients put off: a backward that makes only what the stage before waits for, and the rest later.

    y = x W'           B:  dx = dy W      to the stage before, at once
                       W:  dW = dy' x     whenever there is time; x and dy are held until then

Nothing is computed twice, because a layer's two products are apart. ``nn.Linear``, where the weights of a Transformer
are, is taken apart here, unless its weight is frozen: then nothing is left for ``W``. Any other module can be: it has
an attribute ``later``, None but while gradients may be put off, and then its backward appends calls to it that add them
to ``.grad`` of its parameters. What does neither makes its weights' gradients in ``B``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class PutOff:
    """A call that adds what a module put off to the gradients of its parameters."""

    module: nn.Module
    add: Callable[[], None]

    def __call__(self) -> None:
        """Adds it."""
        self.add()


Later = list[PutOff]
"""What was put off, in order."""


def splitting(layer: nn.Module) -> nn.Module:
    """Returns the layer with every linear module in it whose weight is not frozen made one that can put off its
    gradients, of the same values."""
    for module in layer.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.__class__ = SplitLinear
            cast(SplitLinear, module).later = None
    return layer


class Splits:
    """The modules of one cell that can put off gradients."""

    def __init__(self, cell: nn.Module) -> None:
        self._modules: list[Any] = [module for module in cell.modules() if hasattr(module, "later")]
        self._parameters = list(cell.parameters())

    def collect(self, backward: Callable[[], None]) -> Later:
        """Runs a backward and returns what it put off."""
        later: Later = []
        for module in self._modules:
            module.later = _Page(module, later)
        try:
            backward()
        finally:
            for module in self._modules:
                module.later = None
        return later

    def add(self, later: Later) -> Iterator[nn.Parameter]:
        """Adds what was put off and lets go of it, call by call; on the way returns each of the cell's parameters once
        nothing is left to add to its gradient."""
        left = Counter(id(parameter) for put_off in later for parameter in put_off.module.parameters())
        yield from (parameter for parameter in self._parameters if id(parameter) not in left)
        while later:
            put_off = later.pop(0)
            put_off()
            for parameter in put_off.module.parameters():
                left[id(parameter)] -= 1
                if not left[id(parameter)]:
                    yield parameter


@dataclass(frozen=True)
class _Page:
    """Where one module appends its calls; all write into one list."""

    module: nn.Module
    later: Later

    def append(self, add: Callable[[], None]) -> None:
        self.later.append(PutOff(self.module, add))


class SplitLinear(nn.Linear):
    """``nn.Linear`` that can put off its gradients. Its weight is not frozen, its bias may be."""

    later: _Page | None

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
    """Returns those of weight and bias, from rows (N, in) and gradients (N, out); a frozen bias has none."""
    frozen = module.bias is None or not module.bias.requires_grad
    bias = None if frozen else gradient.sum(0).to(module.bias.dtype)
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
