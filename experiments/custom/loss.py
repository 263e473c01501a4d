"""A loss of your own as the pipeline needs it: sums over a micro-batch, so that micro-batches of any size add up.

    loss of a mini-batch = sum over its micro-batches of (mean over units x units) / units of the mini-batch

So neither K nor M nor R changes the loss or its gradients.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors
from suite.train_spec import TrainSpec

CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)


class SummedLoss(nn.Module):
    """``(objective, metric)`` of a micro-batch, both sums over its units."""

    def __init__(self, spec: TrainSpec, targets: int) -> None:
        """``targets`` is the number of target tensors. Raises SettingError for ``reduction="none"``."""
        super().__init__()
        loss, reduction = spec.loss, getattr(spec.loss, "reduction", "mean")
        if reduction == "none":
            raise SettingError(f'{loss} returns one number a row; use reduction="mean" or reduction="sum"')
        if isinstance(loss, CROSS_ENTROPIES) and reduction == "mean":
            # the same as its mean times its units, but also a number where all targets are ignored
            loss, reduction = copy.copy(loss), "sum"
            loss.reduction = reduction
        self._loss, self._metric, self._units = loss, spec.metric, spec.units
        self._targets, self._is_sum = targets, reduction == "sum"

    def forward(self, *outputs_and_targets: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's outputs, then the targets -> (objective, detached metric); bf16 outputs become fp32."""
        tensors = tuple(tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in outputs_and_targets)
        units = self._units(*tensors[len(tensors) - self._targets :]) if self._units is not None else len(tensors[-1])
        objective = self._loss(*tensors)
        objective = objective if self._is_sum else objective * units
        with torch.no_grad():
            metric = objective if self._metric is None else self._metric(*tensors) * units
        return objective, torch.as_tensor(metric, dtype=objective.dtype, device=objective.device).detach()


def units_of(spec: TrainSpec, targets: Tensors) -> float:
    """Returns the units of a mini-batch: what its loss is a mean over.

    By default its rows. For torch's cross entropy what its own mean divides by: the targets that are not ignored, each
    with the weight of its class.
    """
    if spec.units is not None:
        return float(spec.units(*targets))
    loss, labels = spec.loss, targets[-1] if targets else None
    if labels is None or not isinstance(loss, CROSS_ENTROPIES) or loss.reduction == "sum":
        return float(len(targets[-1]))
    if labels.is_floating_point():  # a probability for each class
        return float(labels.numel() / labels.shape[1])
    counted = labels[labels != loss.ignore_index]
    return float(len(counted) if loss.weight is None else loss.weight.cpu()[counted].sum())
