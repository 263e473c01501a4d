"""Computes the softmax projection and its loss in chunks of positions, so that large logits are never materialized.

    y (positions, width) --chunk--> logits (chunk, vocabulary) --> losses, summed     saved: y, the sum of each row
                                                                                      backward: recompute each chunk

The logits of 4096 positions over 64,000 words take 1 GiB in fp32, and so does their gradient; the layers of a
stage may take less. A recompute of a chunk's logits costs one product more than saving them, so small logits are saved.

The weight's gradient is never deferred (``suite.pipeline.runtime.weight_grad``): zero-bubble schedules compute it in
``I``, while a chunk's logits and their gradients exist. To compute it later, in ``W``, would need the gradients of all
logits, which is the memory that chunks save, or a third computation of the logits, which is more work for the last
stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.blocks import reset_linear
from models.loss import TranslationLoss, clipped, smoothed_gradient, smoothed_sums
from models.shape import BlockShape
from suite.decoding.kv_cache import LayerCache
from suite.pipeline.runtime.weight_grad import weight_grad_sum

CPU_LOGITS_BYTES = 64 << 20
"""Logits up to this size, in fp32, are computed at once on a CPU; larger ones in chunks of this size."""

DEVICE_SHARE = 128
"""On an accelerator the size is its memory divided by this: 632 MiB of 79 GiB. The last stage then holds the logits, in
bf16 or fp32, and their gradient."""

CHUNKS = 64
"""The most chunks; beyond that the chunks grow, which limits the loop's overhead."""


def accelerator_logits_bytes(device_bytes: int) -> int:
    """Returns the size of logits that an accelerator with this memory computes at once."""
    return max(CPU_LOGITS_BYTES, device_bytes // DEVICE_SHARE)


class ChunkedHead(nn.Module):
    """A last layer: the softmax projection of the first of its inputs, with bias."""

    logits_bytes = CPU_LOGITS_BYTES

    def __init__(self, shape: BlockShape, norm: nn.Module, clip: float | None) -> None:
        """``norm`` is what comes before the projection, ``clip`` the bound of the logits' magnitude."""
        super().__init__()
        self.clip, self.norm = clip, norm
        self.project = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, y: Tensor, *others: Tensor) -> Tensor:
        """y (batch, T, width) -> logits (batch, T, vocabulary)."""
        return clipped(self.project(self.norm(y)), self.clip)

    def gpipe_score(
        self, loss: TranslationLoss, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns ``loss(self(*inputs), *targets)`` without materializing large logits."""
        y, labels = self.norm(inputs[0]).flatten(0, -2), targets[0].flatten()
        chunk_rows = rows_at_once(self.project.out_features, len(labels), self.logits_bytes)
        if len(labels) <= chunk_rows:
            return loss(self.project(y), labels, self.clip)
        rows = y, self.project.weight, self.project.bias, labels
        return _InChunks.apply(*rows, loss.label_smoothing, self.clip, chunk_rows)

    def prefill(self, y: Tensor, *others: Tensor) -> tuple[tuple[Tensor], LayerCache]:
        """y (batch, T, width) -> logits of the last position (batch, vocabulary)."""
        cache = LayerCache()
        return self.decode_step(cache, y), cache

    def decode_step(self, cache: LayerCache, y: Tensor) -> tuple[Tensor]:
        """y (rows, 1, width) -> logits (rows, vocabulary)."""
        return (self(y[:, -1]),)

    def reset_parameters(self) -> None:
        """Glorot-uniform, so the initial distribution is nearly uniform; bias zero."""
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()
        reset_linear(self.project)


def set_logits_bytes(layers: Iterable[nn.Module], logits_bytes: int) -> None:
    """Sets the size of logits that a model computes at once."""
    for layer in layers:
        if isinstance(layer, ChunkedHead):
            layer.logits_bytes = logits_bytes


def rows_at_once(vocabulary: int, positions: int, logits_bytes: int = CPU_LOGITS_BYTES) -> int:
    """Returns the number of positions in a chunk."""
    return max(1, logits_bytes // (4 * vocabulary), -(-positions // CHUNKS))


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        smoothing: float,
        clip: float | None,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        device_type = y.device.type
        ctx.smoothing, ctx.clip, ctx.chunk_rows = smoothing, clip, chunk_rows
        ctx.product_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else y.dtype
        parts = [
            smoothed_sums(F.linear(chunk, weight, bias), chunk_labels, smoothing, clip)
            for chunk, chunk_labels in zip(torch.split(y, chunk_rows), torch.split(labels, chunk_rows), strict=True)
        ]
        objectives, metrics, log_totals = zip(*parts, strict=True)
        objective, metric = torch.stack(objectives).sum(), torch.stack(metrics).sum()
        ctx.save_for_backward(y, weight, bias, labels, torch.cat(log_totals))
        ctx.mark_non_differentiable(metric)
        return objective, metric

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, objective_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, bias, labels, log_totals = ctx.saved_tensors
        input_grad = torch.empty_like(y)
        weight_grad, bias_grad = torch.zeros_like(weight), torch.zeros_like(bias)
        # cast here, not by autocast: a context that ends in a thread of the backward frees the casts of all weights
        factor, summand = weight.to(ctx.product_dtype), bias.to(ctx.product_dtype)
        for chunk, chunk_labels, chunk_totals, chunk_grad in zip(
            *(torch.split(t, ctx.chunk_rows) for t in (y, labels, log_totals, input_grad)), strict=True
        ):
            x = chunk.to(ctx.product_dtype)
            logits = F.linear(x, factor, summand)
            gradient = smoothed_gradient(logits, chunk_labels, ctx.smoothing, ctx.clip, chunk_totals, objective_grad)
            del logits  # the products below may need its memory
            chunk_grad.copy_(gradient @ factor)
            weight_grad = weight_grad_sum(weight_grad, x, gradient, weight.dtype)
            bias_grad += gradient.sum(0)
        return input_grad, weight_grad, bias_grad, None, None, None, None
