"""Losses: label-smoothed cross entropy as objective; as metric, negative log likelihood, or correct images."""

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
        """scores (batch, classes), labels (batch,) int64 -> (objective, correctly classified images)."""
        wide = scores if scores.dtype == torch.float64 else scores.float()
        objective = F.cross_entropy(wide, labels, reduction="sum", label_smoothing=self.label_smoothing)
        return objective, (wide.argmax(1) == labels).sum().to(wide.dtype)


class TranslationLoss(nn.Module):
    """Sums over the tokens that are not padding, so that micro-batches add up to the mini-batch's sum."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits (batch, T, vocabulary), labels (batch, T) int64 -> (objective, metric), both scalars.

        The objective's target gives e / V to each of the V entries and 1-e to the label ("Rethinking the Inception
        architecture", section 7); the metric is detached. Both are fp32 for bf16 logits, fp64 for fp64 ones.
        """
        objective, metric = _SmoothedSum.apply(logits, labels, self.label_smoothing)  # type: ignore[no-untyped-call]
        return objective, metric


class _SmoothedSum(torch.autograd.Function):
    """Cross entropy that saves only the logits and one number per token between forward and backward.

    It is written by hand because autograd of the plain formula needs five fp32 tensors of the logits' size; at 64000
    entries these, not the layers, would fill the last stage's device.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_total = wide.logsumexp(-1)
        nll = log_total - wide.gather(-1, labels[..., None])[..., 0]
        uniform_nll = log_total - wide.mean(-1)
        scored = labels != PADDING
        ctx.save_for_backward(logits, labels, log_total)
        ctx.smoothing = smoothing
        objective = torch.where(scored, torch.lerp(nll, uniform_nll, smoothing), 0).sum()
        metric = torch.where(scored, nll, 0).sum()
        ctx.mark_non_differentiable(metric)
        return objective, metric

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, objective_grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """d objective / d logit_v = softmax_v - e / V - (1 - e) [v is the label], and zero at padding."""
        logits, labels, log_total = ctx.saved_tensors
        gradient = (logits - log_total[..., None]).exp_()
        gradient.sub_(ctx.smoothing / logits.shape[-1])
        label_grad = gradient.new_full((), ctx.smoothing - 1).expand_as(labels)[..., None]
        gradient.scatter_add_(-1, labels[..., None], label_grad)
        gradient.mul_((objective_grad * (labels != PADDING))[..., None])
        return gradient.to(logits.dtype), None, None
