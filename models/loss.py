"""Losses: label-smoothed cross entropy as objective; as metric, negative log likelihood, or correct images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.shape import PADDING
from suite.device import fused


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

    def forward(self, logits: Tensor, labels: Tensor, clip: float | None = None) -> tuple[Tensor, Tensor]:
        """logits (..., vocabulary), labels (...) int64 -> (objective, metric), both scalars.

        The objective's target gives e / V to each of the V entries and 1-e to the label ("Rethinking the Inception
        architecture", section 7); the metric is detached. Both are fp32 for bf16 logits, fp64 for fp64 ones. Logits
        beyond ``clip`` count as ``clip``, on both sides, and are overwritten.
        """
        return _SmoothedSum.apply(logits.flatten(0, -2), labels.flatten(), self.label_smoothing, clip)


def clipped(logits: Tensor, bound: float | None) -> Tensor:
    """Returns the logits clipped on both sides, in place: the backward needs only the clipped values. The compiler
    writes no clipped ones, and computes them in the kernel that reads them."""
    if bound is None:
        return logits
    return F.hardtanh(logits, -bound, bound, inplace=not torch.compiler.is_compiling())


@fused
def smoothed_sums(
    logits: Tensor, labels: Tensor, smoothing: float, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``TranslationLoss.forward``, of rows (N, vocabulary) without a graph; returns also the logarithm of each row's
    sum of exponentials (N,), for the gradient."""
    wide = clipped(logits, clip)
    wide = wide if wide.dtype == torch.float64 else wide.float()
    log_total = wide.logsumexp(-1)
    nll = log_total - wide.gather(-1, labels[:, None])[:, 0]
    uniform_nll = log_total - wide.mean(-1)
    scored = labels != PADDING
    objective = torch.where(scored, torch.lerp(nll, uniform_nll, smoothing), 0).sum()
    return objective, torch.where(scored, nll, 0).sum(), log_total


@fused
def smoothed_gradient(
    logits: Tensor, labels: Tensor, smoothing: float, clip: float | None, log_total: Tensor, objective_grad: Tensor
) -> Tensor:
    """Returns the gradient of the objective in the logits (N, vocabulary), times ``objective_grad``; overwrites logits
    beyond ``clip``.

    d objective / d logit_v = softmax_v - e / V - (1 - e) [v is the label], and zero at padding and where clipped.
    """
    logits = clipped(logits, clip)
    log_total, scale = log_total[:, None], (objective_grad * (labels != PADDING))[:, None]

    def of(part: Tensor, *targets: float) -> Tensor:
        found = (part - log_total).exp_()
        for target in targets:
            found.sub_(target)
        found = found.mul_(scale).to(part.dtype)
        return found if clip is None else torch.ops.aten.hardtanh_backward(found, part, -clip, clip)

    uniform, at_label = smoothing / logits.shape[-1], labels[:, None]
    return of(logits, uniform).scatter_(-1, at_label, of(logits.gather(-1, at_label), uniform, 1 - smoothing))


class _SmoothedSum(torch.autograd.Function):
    """Cross entropy that saves only the logits and one number per token between forward and backward.

    It is written by hand because autograd of the plain formula needs five fp32 tensors of the logits' size; at 64000
    entries these, not the layers, would fill the last stage's device.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, clip: float | None
    ) -> tuple[Tensor, Tensor]:
        objective, metric, log_total = smoothed_sums(logits, labels, smoothing, clip)
        ctx.save_for_backward(logits, labels, log_total)
        ctx.smoothing, ctx.clip = smoothing, clip
        ctx.mark_non_differentiable(metric)
        return objective, metric

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, objective_grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, log_total = ctx.saved_tensors
        gradient = smoothed_gradient(logits, labels, ctx.smoothing, ctx.clip, log_total, objective_grad)
        return gradient, None, None, None
