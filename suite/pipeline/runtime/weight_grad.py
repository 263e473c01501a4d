"""Weight gradients of linear layers: deferred, or added to their sum in fp32 by the product itself.

    y = x W'           I:  dx = dy W      sent to the previous stage at once
                       W:  dW = dy' x     when the stage is idle; x and dy are held until then

Nothing is computed twice, because the two products are independent. This module splits ``nn.Linear``, which holds most
weights of a Transformer, unless its weight is frozen: then nothing is left for ``W``. Any other module can take part:
it has an attribute ``gpipe_grad_queue``, which is None unless gradients are deferred; then its backward appends calls
to it that add them to ``.grad`` of its parameters. All other modules compute their weight gradients in ``I``.

    under autocast     dW = bf16(dy' x), .grad += fp32(dW)     rounds each micro-batch's part, 20 bytes a parameter
    here, on a GPU     .grad = .grad + dy' x                   rounds no part, 8 bytes a parameter

The second is one product that reads and writes ``.grad``; Megatron-Core calls it gradient accumulation fusion. Every
backward does so on a device of ``suite.device.MULTIPLIES_BF16_INTO_FP32``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suite.device import MULTIPLIES_BF16_INTO_FP32


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
        if type(module) is nn.Linear and module.weight.requires_grad and not any(map(_is_special, module.parameters())):
            module.__class__ = DeferrableLinear
            linear = cast(DeferrableLinear, module)
            linear.gpipe_grad_queue, linear.keeps_cast, linear.kept_cast = None, False, None
            linear.adds_to_grad, linear.splits = False, True
    return layer


def _is_special(parameter: nn.Parameter) -> bool:
    """Whether hooks wait for its gradient, or its class may have a product of its own: a split product has neither."""
    return bool(parameter._backward_hooks) or type(parameter).__torch_function__ is not nn.Parameter.__torch_function__


class WeightGradStore:
    """The modules of one cell that can defer gradients."""

    def __init__(self, cell: nn.Module) -> None:
        self.modules: list[Any] = [module for module in cell.modules() if hasattr(module, "gpipe_grad_queue")]
        self._linears = [module for module in self.modules if isinstance(module, DeferrableLinear)]
        self._parameters = list(cell.parameters())
        self._splits = True

    def split_products(self, splits: bool) -> None:
        """Whether the backward of the next forwards may be deferred. In fp32 a backward that is not deferred is that of
        ``nn.Linear``, which is faster where layers are narrow."""
        if splits != self._splits:
            self._splits = splits
            for linear in self._linears:
                linear.splits = splits

    def keep_casts(self, keep: bool) -> None:
        """Whether each linear module keeps weight and bias, cast to another type, for its next products; if not, the
        casts are freed."""
        for linear in self._linears:
            linear.keeps_cast, linear.kept_cast = keep, None

    @contextmanager
    def adding_to_grad(self) -> Iterator[None]:
        """A context for a backward in which products of linear modules add to ``.grad``."""
        for linear in self._linears:
            linear.adds_to_grad = True
        try:
            yield
        finally:
            for linear in self._linears:
                linear.adds_to_grad = False

    def run_deferred(self, backward: Callable[[], None]) -> DeferredGrads:
        """Runs a backward and returns the gradients that it deferred."""
        deferred: DeferredGrads = []
        for module in self.modules:
            module.gpipe_grad_queue = _ModuleQueue(module, deferred)
        try:
            backward()
        finally:
            for module in self.modules:
                module.gpipe_grad_queue = None
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

    gpipe_grad_queue: _ModuleQueue | None
    adds_to_grad: bool
    """Whether a backward runs whose products add to ``.grad``."""
    splits: bool
    """Whether the backward of a forward may be deferred."""
    keeps_cast: bool
    kept_cast: tuple[Tensor, Tensor | None] | None

    def values_in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns weight (out, in) and bias (out,) in a type, without gradients."""
        if self.kept_cast is not None and self.kept_cast[0].dtype == dtype:
            return self.kept_cast
        cast = self.weight.detach().to(dtype), None if self.bias is None else self.bias.detach().to(dtype)
        if self.keeps_cast and dtype != self.weight.dtype:
            self.kept_cast = cast
        return cast

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if any(_is_special(own) for own in self._parameters.values() if own is not None):  # torch.func.functional_call
            return F.linear(x, self.weight, self.bias)
        is_mixed = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_mixed else x.dtype  # of the product
        if not torch.is_grad_enabled():  # without keeps_cast, as in decoding, autocast keeps the cast
            return F.linear(x, *(self.values_in(dtype) if self.keeps_cast else (self.weight, self.bias)))
        if torch._C._are_functorch_transforms_active() or (not self.splits and dtype == self.weight.dtype):
            return F.linear(x, self.weight, self.bias)
        rows: Tensor = _DeferrableLinear.apply(x.reshape(-1, self.in_features).to(dtype), self.weight, self.bias, self)
        # rows stay rows: what changes a view in place, such as a clip of the logits, copies its gradient twice
        return rows if x.ndim == 2 else rows.view(*x.shape[:-1], self.out_features)


class _DeferrableLinear(torch.autograd.Function):
    """Rows (N, in) -> (N, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: DeferrableLinear) -> Tensor:
        # a forward inside a backward recomputes, and may take gradients of its own by torch.autograd.grad
        ctx.module, ctx.in_backward = module, module.adds_to_grad or module.gpipe_grad_queue is not None
        with torch.autocast(x.device.type, enabled=False):
            factor, summand = module.values_in(x.dtype)
            ctx.save_for_backward(x, factor, weight, bias)
            return F.linear(x, factor, summand)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, factor, weight, bias = ctx.saved_tensors
        module: DeferrableLinear = ctx.module
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # this gradient will be differentiated, so it depends on the weight itself
            factor = weight.to(x.dtype)
        input_grad = gradient @ factor if needs_x else None
        if module.gpipe_grad_queue is not None and not ctx.in_backward:
            module.gpipe_grad_queue.append(lambda: _add(module, x, gradient))
            return input_grad, None, None, None
        bias_grad = gradient.sum(0).to(bias.dtype) if needs_bias else None
        total = None
        # a hook on the weight gets the gradient of one micro-batch
        own = module.weight
        is_plain = own.is_leaf and not own._backward_hooks and not torch.is_grad_enabled()
        if module.adds_to_grad and is_plain and not ctx.in_backward:
            # autograd gets the new sum in place of the old, so what waits for the complete gradient is called as ever
            total, own.grad = own.grad, None
        return input_grad, weight_grad_sum(total, x, gradient, weight.dtype), bias_grad, None


@torch.no_grad()
def _add(module: DeferrableLinear, x: Tensor, gradient: Tensor) -> None:
    """Adds the gradients of rows x (N, in) and gradients (N, out) to ``.grad`` of weight and bias."""
    module.weight.grad = weight_grad_sum(module.weight.grad, x, gradient, module.weight.dtype)
    if module.bias is not None and module.bias.requires_grad:
        summand = gradient.sum(0).to(module.bias.dtype)
        module.bias.grad = summand if module.bias.grad is None else module.bias.grad.add_(summand)


def weight_grad_sum(total: Tensor | None, x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``total`` plus the weight's gradient of rows x (N, in) and gradients (N, out), in the memory of
    ``total``; the gradient alone if there is no total."""
    from_bf16_to_fp32 = (x.dtype, dtype) == (torch.bfloat16, torch.float32)
    if from_bf16_to_fp32 and x.device.type in MULTIPLIES_BF16_INTO_FP32:
        if total is None:
            return torch.mm(gradient.t(), x, out_dtype=dtype)
        return torch.addmm(total, gradient.t(), x, out_dtype=dtype, out=total)
    summand = (gradient.t() @ x).to(dtype)
    return summand if total is None else total.add_(summand)
