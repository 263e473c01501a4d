"""LayerNorm with the casts around it and the sum before it: one kernel forward, where torch compiles, and few backward.

    eager                                    bytes a value       fused
    dropped -> x + dropped                   2 + 2 + 2           x, dropped -> sum, norm(sum)     2 + 2 + 2 + 2
    sum -> fp32 -> norm -> bf16              6 + 8 + 6

Elsewhere it is torch's LayerNorm to the bit. The operators are those that autograd runs, with their roundings, so the
values are the same within the order of the sums over a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from suite.device import fused, is_fused


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dimension, of rows (..., width). Under autocast a fused one returns the type of
    the products that read it."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return self._fused(x, None)[1] if self._is_fused(x) else super().forward(x)

    def of_sum(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x + branch, and its norm."""
        if self._is_fused(x):
            return self._fused(x, branch)
        x = x + branch
        return x, super().forward(x)

    def _is_fused(self, x: Tensor) -> bool:
        return is_fused(x) and self.bias is not None and not torch._C._are_functorch_transforms_active()

    def _fused(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        kind = x.device.type
        product_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        total, normed = _SummedNorm.apply(x, branch, self.weight, self.bias, self.eps, product_dtype)
        return x if total is None else total, normed


@fused
def summed_norm(
    x: Tensor, branch: Tensor | None, *, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Rows (N, width), twice -> their sum, its norm in ``dtype``, and mean and 1 / deviation of each row (N, 1).
    Without ``branch`` the norm is that of x, and no sum is returned."""
    total = None if branch is None else x + branch
    wide = (x if total is None else total).to(weight.dtype)
    normed, mean, scale = torch.native_layer_norm(wide, weight.shape, weight, bias, eps)
    return total, normed.to(dtype), mean, scale


@fused
def summed_norm_gradients(
    gradient: Tensor, total_gradient: Tensor | None, total: Tensor, mean: Tensor, scale: Tensor, *, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the sum (N, width), of weight and of bias, from those of the norm and of the sum."""
    wide, shape = total.to(weight.dtype), weight.shape
    of_total, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
        gradient.to(weight.dtype), wide, shape, mean, scale, weight, weight, [True, True, True]
    )
    of_total = of_total.to(total.dtype)
    return of_total if total_gradient is None else total_gradient + of_total, of_weight, of_bias


class _SummedNorm(torch.autograd.Function):
    """Of tensors (..., width); in here they are rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        rows, own = _rows(x), None if branch is None else _rows(branch)
        total, normed, mean, scale = summed_norm(rows, own, weight=weight, bias=bias, eps=eps, dtype=dtype)
        ctx.save_for_backward(rows if total is None else total, mean, scale, weight)
        return None if total is None else total.view_as(x), normed.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_gradient: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, scale, weight = ctx.saved_tensors
        of_sum = None if total_gradient is None else _rows(total_gradient)
        found, *of_weights = summed_norm_gradients(_rows(gradient), of_sum, total, mean, scale, weight=weight)
        found = found.view_as(gradient)
        return found, found if ctx.needs_input_grad[1] else None, *of_weights, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
