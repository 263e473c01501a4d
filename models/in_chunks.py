"""A softmax's projection and its loss over some positions at a time, so that large logits never stand whole.

    y (positions, width) --chunk--> logits (chunk, vocabulary) --> losses, summed     kept for the backward: y alone
                                                                                      backward: each chunk again

The logits of 4096 positions over 64,000 words are 1 GiB in fp32, and their gradient as much; the layers of a stage
may be less. Making a chunk's logits again costs one product more than keeping them, so small ones are kept.

The weight's gradient is never put off (``suite.pipeline.put_off``): zero-bubble schedules compute it in ``B``, while a
chunk's logits and their gradients are there. To compute it later, in ``W``, would take the logits' gradients whole,
which is the memory that chunks save, or the logits made a third time, which is more work for the last stage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WHOLE_BYTES = 64 << 20
"""Logits up to this size, in fp32, stand whole; larger ones are made in chunks of it."""

CHUNKS = 64
"""At most: past it the chunks grow, as the loop over them takes its own time and they are a small part of the whole."""


def rows_at_once(vocabulary: int, positions: int) -> int:
    """Returns how many positions' logits stand at once."""
    return max(1, WHOLE_BYTES // (4 * vocabulary), -(-positions // CHUNKS))


def clipped(logits: Tensor, bound: float | None) -> Tensor:
    """Returns the logits clipped either way, in place: the backward needs only the clipped values, and the loss keeps
    these anyway."""
    return logits if bound is None else F.hardtanh(logits, -bound, bound, inplace=True)


def scored(
    y: Tensor, project: nn.Linear, clip: float | None, loss: nn.Module, labels: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the objective and the measure of y (batch, T, width) and labels (batch, T), as ``loss`` sums them."""
    if labels.numel() <= rows_at_once(project.out_features, labels.numel()):
        whole: tuple[Tensor, Tensor] = loss(clipped(project(y), clip), labels)
        return whole
    rows = y.flatten(0, -2), project.weight, project.bias, labels.flatten()
    found = _InChunks.apply(*rows, clip, loss)  # type: ignore[no-untyped-call]
    objective, measure = found
    return objective, measure


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, clip: float | None, loss: nn.Module
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(y, weight, bias, labels)
        kind = y.device.type
        ctx.clip, ctx.loss, ctx.mixed = clip, loss, torch.is_autocast_enabled(kind)
        ctx.narrow = torch.get_autocast_dtype(kind)
        rows = rows_at_once(weight.shape[0], len(y))
        parts = [
            loss(clipped(F.linear(piece, weight, bias), clip), marks)
            for piece, marks in zip(torch.split(y, rows), torch.split(labels, rows), strict=True)
        ]
        objective, measure = (torch.stack(column).sum() for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(measure)
        return objective, measure

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, bias, labels = ctx.saved_tensors
        rows = rows_at_once(weight.shape[0], len(y))
        onward = torch.empty_like(y)
        sums = torch.zeros_like(weight), torch.zeros_like(bias)
        for piece, marks, made in zip(*(torch.split(t, rows) for t in (y, labels, onward)), strict=True):
            leaves = [tensor.detach().requires_grad_() for tensor in (piece, weight, bias)]
            with torch.enable_grad(), torch.autocast(y.device.type, ctx.narrow, enabled=ctx.mixed):
                objective, _measure = ctx.loss(clipped(F.linear(*leaves), ctx.clip), marks)
            first, *others = torch.autograd.grad(objective, leaves, slope.to(objective.dtype))
            made.copy_(first)
            for total, summand in zip(sums, others, strict=True):
                total += summand
        return onward, *sums, None, None, None
