"""A loss of your own as the pipeline needs it: sums over a micro-batch, so that micro-batches of any size add up.

    loss of a mini-batch = sum over its micro-batches of (mean over units x units) / units of the mini-batch

So neither K nor M nor R changes the loss or its gradients.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors
from suite.train_spec import TrainSpec

CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)


class SummedLoss(nn.Module):
    """``(objective, metric)`` of a micro-batch, both sums over its units."""

    def __init__(self, spec: TrainSpec, targets: int) -> None:
        """``targets`` is the number of target tensors. Raises SettingError for ``reduction="none"`` and for a loss with
        parameters."""
        super().__init__()
        loss, reduction = spec.loss, getattr(spec.loss, "reduction", "mean")
        if reduction == "none":
            raise SettingError(f'{loss} returns one number a row; use reduction="mean" or reduction="sum"')
        if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
            raise SettingError(f"the loss {type(loss).__name__} has parameters, which would not be trained; move them "
                               "into the last layer")  # fmt: skip
        if _counts_own_units(spec):
            # the same as its mean times its units, but also a number where all targets are ignored
            loss, reduction = copy.copy(loss), "sum"
            loss.reduction = reduction  # type: ignore[attr-defined]
        self._loss, self._spec, self._targets, self._is_sum = loss, spec, targets, reduction == "sum"

    def forward(self, *outputs_and_targets: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's outputs, then the targets -> (objective, detached metric); bf16 outputs become fp32."""
        tensors = tuple(tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in outputs_and_targets)
        if isinstance(tensors[0], FakeTensor):  # an estimate of costs: shapes without values
            objective = self._loss(*tensors)
            return objective, objective.detach()
        first = len(tensors) - self._targets
        units = units_of(self._spec, tensors[first:] or tensors)
        if units == 0:  # a mean over nothing is not a number
            nothing = torch.stack([output.sum() for output in tensors[:first]]).sum() * 0
            return nothing, nothing.detach()
        objective = self._loss(*tensors)
        if not isinstance(objective, Tensor):
            raise TypeError(f"it returned a {type(objective).__name__}; return a tensor, without .item()")
        objective = objective if self._is_sum else objective * units
        if self._spec.metric is None:
            return objective, objective.detach()
        with torch.no_grad():
            metric = torch.as_tensor(self._spec.metric(*tensors) * units, dtype=objective.dtype)
        return objective, metric.to(objective.device)


def _counts_own_units(spec: TrainSpec) -> bool:
    """Whether the loss is torch's cross entropy with a mean over the targets that it does not ignore."""
    return spec.units is None and type(spec.loss) in CROSS_ENTROPIES and spec.loss.reduction == "mean"  # type: ignore[attr-defined]


def units_of(spec: TrainSpec, targets: Tensors) -> float:
    """Returns the units of rows: what their loss is a mean over.

    By default the rows. For torch's cross entropy what its own mean divides by: the targets that are not ignored, each
    with the weight of its class.
    """
    if spec.units is not None:
        return float(spec.units(*targets))
    if not _counts_own_units(spec):
        return float(len(targets[-1]))
    loss, labels = spec.loss, targets[-1]
    if labels.is_floating_point():  # a probability for each class
        return float(labels.numel() / labels.shape[1])
    counted = labels[labels != loss.ignore_index]  # type: ignore[attr-defined]
    weight: Tensor | None = loss.weight  # type: ignore[attr-defined]
    return float(len(counted) if weight is None else weight.to(counted.device)[counted].sum())
