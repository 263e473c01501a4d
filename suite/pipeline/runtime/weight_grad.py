"""Deferred weight gradients: a backward first computes only what the previous stage waits for, the rest later.

    y = x W'           I:  dx = dy W      sent to the previous stage at once
                       W:  dW = dy' x     when the stage is idle; x and dy are held until then

Nothing is computed twice, because the two products are independent. This module splits ``nn.Linear``, which holds most
weights of a Transformer, unless its weight is frozen: then nothing is left for ``W``. Any other module can take part:
it has an attribute ``grad_queue``, which is None unless gradients are deferred; then its backward appends calls to it
that add them to ``.grad`` of its parameters. All other modules compute their weight gradients in ``I``.
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
class DeferredGrad:
    """A call that adds deferred gradients to ``.grad`` of a module's parameters."""

    module: nn.Module
    add: Callable[[], None]


DeferredGrads = list[DeferredGrad]
"""The calls of one backward, in order."""


def with_deferrable_linears(layer: nn.Module) -> nn.Module:
    """Returns the layer after making each linear module in it whose weight is not frozen a ``DeferrableLinear`` of the
    same values."""
    for module in layer.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.__class__ = DeferrableLinear
            linear = cast(DeferrableLinear, module)
            linear.grad_queue, linear.keeps_cast, linear.kept_cast = None, False, None
    return layer


class WeightGradStore:
    """The modules of one cell that can defer gradients."""

    def __init__(self, cell: nn.Module) -> None:
        self._modules: list[Any] = [module for module in cell.modules() if hasattr(module, "grad_queue")]
        self._parameters = list(cell.parameters())

    def keep_casts(self, keep: bool) -> None:
        """Whether each linear module keeps its weight's cast to another type for its next products; if not, it is
        freed."""
        for module in self._modules:
            if isinstance(module, DeferrableLinear):
                module.keeps_cast, module.kept_cast = keep, None

    def run_deferred(self, backward: Callable[[], None]) -> DeferredGrads:
        """Runs a backward and returns the gradients that it deferred."""
        deferred: DeferredGrads = []
        for module in self._modules:
            module.grad_queue = _ModuleQueue(module, deferred)
        try:
            backward()
        finally:
            for module in self._modules:
                module.grad_queue = None
        return deferred

    def apply(self, deferred: DeferredGrads) -> Iterator[nn.Parameter]:
        """Adds deferred gradients and frees them, call by call; yields each of the cell's parameters once its gradient
        is complete."""
        missing = Counter(id(parameter) for grad in deferred for parameter in grad.module.parameters())
        yield from (parameter for parameter in self._parameters if id(parameter) not in missing)
        while deferred:
            grad = deferred.pop(0)
            grad.add()
            for parameter in grad.module.parameters():
                missing[id(parameter)] -= 1
                if not missing[id(parameter)]:
                    yield parameter


@dataclass(frozen=True)
class _ModuleQueue:
    """Where one module appends its calls; all modules share one list."""

    module: nn.Module
    deferred: DeferredGrads

    def append(self, add: Callable[[], None]) -> None:
        self.deferred.append(DeferredGrad(self.module, add))


class DeferrableLinear(nn.Linear):
    """``nn.Linear`` that can defer its gradients. Its weight is not frozen, its bias may be."""

    grad_queue: _ModuleQueue | None
    keeps_cast: bool
    kept_cast: Tensor | None

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight, (out, in), in a type."""
        if self.kept_cast is not None and self.kept_cast.dtype == dtype:
            return self.kept_cast
        weight = self.weight.detach().to(dtype)
        if self.keeps_cast and dtype != self.weight.dtype:
            self.kept_cast = weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight_in(_product_dtype(x)), self.bias)
        rows: Tensor = _DeferrableLinear.apply(x.reshape(-1, self.in_features), self.weight, self.bias, self)
        # rows stay rows: what changes a view in place, such as a clip of the logits, copies its gradient twice
        return rows if x.ndim == 2 else rows.view(*x.shape[:-1], self.out_features)


class _DeferrableLinear(torch.autograd.Function):
    """Rows (N, in) -> (N, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: DeferrableLinear) -> Tensor:
        dtype = _product_dtype(x)
        ctx.module, ctx.input_dtype = module, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            x, factor = x.to(dtype), module.weight_in(dtype)
            ctx.save_for_backward(x, factor)
            return F.linear(x, factor, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, factor = ctx.saved_tensors
        module: DeferrableLinear = ctx.module
        input_grad = (gradient @ factor).to(ctx.input_dtype) if ctx.needs_input_grad[0] else None
        if module.grad_queue is None:
            weight, bias = _gradients(module, x, gradient)
            return input_grad, weight, bias, None
        module.grad_queue.append(lambda: _add(module, x, gradient))
        return input_grad, None, None, None


def _product_dtype(x: Tensor) -> torch.dtype:
    """Returns the type in which a product with x is computed."""
    is_mixed = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_mixed else x.dtype


def _gradients(module: DeferrableLinear, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of weight and bias from rows (N, in) and gradients (N, out); None for a frozen bias."""
    frozen = module.bias is None or not module.bias.requires_grad
    bias = None if frozen else gradient.sum(0).to(module.bias.dtype)
    return (gradient.t() @ x).to(module.weight.dtype), bias


@torch.no_grad()
def _add(module: DeferrableLinear, x: Tensor, gradient: Tensor) -> None:
    weight, bias = _gradients(module, x, gradient)
    for parameter, summand in ((module.weight, weight), (module.bias, bias)):
        if parameter is None or summand is None:
            continue
        if parameter.grad is None:
            parameter.grad = summand
        else:
            parameter.grad += summand
