"""Losses: label-smoothed cross entropy to train on; to report, plain negative log likelihood of tokens, or hits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.shape import PADDING


class ClassificationLoss(nn.Module):
    """Sums over the images of a micro-batch."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """scores (batch, classes), labels (batch,) int64 -> (objective, images whose highest score is right)."""
        wide = scores if scores.dtype == torch.float64 else scores.float()
        objective = F.cross_entropy(wide, labels, reduction="sum", label_smoothing=self.label_smoothing)
        return objective, (wide.argmax(1) == labels).sum().to(wide.dtype)


class TranslationLoss(nn.Module):
    """Sums over the tokens that are not padding, so that micro-batches add up to the mini-batch's sum."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits (batch, T, vocabulary), labels (batch, T) int64 -> (objective, measure), both scalars.

        The objective's target gives a share e to all V entries alike and 1-e to the label ("Rethinking the Inception
        architecture", section 7); the measure is detached. Both are fp32 for bf16 logits, fp64 for fp64 ones.
        """
        objective, measure = _SmoothedSum.apply(logits, labels, self.label_smoothing)  # type: ignore[no-untyped-call]
        return objective, measure


class _SmoothedSum(torch.autograd.Function):
    """Cross entropy that keeps only the logits and one number a token between forward and backward.

    Written by hand because the graph of the plain formula keeps or makes five tensors of the logits' size in fp32, and
    at 64000 entries these, not the layers, would fill the last stage's device.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_total = wide.logsumexp(-1)
        nll = log_total - wide.gather(-1, labels[..., None])[..., 0]
        even = log_total - wide.mean(-1)
        scored = labels != PADDING
        ctx.save_for_backward(logits, labels, log_total)
        ctx.smoothing = smoothing
        objective = torch.where(scored, torch.lerp(nll, even, smoothing), 0).sum()
        measure = torch.where(scored, nll, 0).sum()
        ctx.mark_non_differentiable(measure)
        return objective, measure

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """d objective / d logit_v = softmax_v - e / V - (1 - e) [v is the label], and zero at padding."""
        logits, labels, log_total = ctx.saved_tensors
        gradient = (logits - log_total[..., None]).exp_()
        gradient.sub_(ctx.smoothing / logits.shape[-1])
        hit = gradient.new_full((), ctx.smoothing - 1).expand_as(labels)[..., None]
        gradient.scatter_add_(-1, labels[..., None], hit)
        gradient.mul_((slope * (labels != PADDING))[..., None])
        return gradient.to(logits.dtype), None, None
