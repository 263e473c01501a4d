"""A loss of your own as the pipeline needs it: sums over a micro-batch, so that micro-batches of any size add up.

    loss of a mini-batch = sum over its micro-batches of (mean over units x units) / units of the mini-batch

So neither K nor M nor R changes the loss or its gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from suite.device import is_host
from suite.errors import SettingError, typed_line
from suite.pipeline.model.layers import Tensors
from suite.train_spec import TrainSpec

CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)

RESERVED = ("loss", "grad_norm", "lr", "applied", "rows", "seconds")
"""Names in ``train/`` and ``valid/`` that every run has."""


class SummedLoss(nn.Module):
    """``(objective, metrics)`` of a micro-batch, all sums over its units."""

    def __init__(self, spec: TrainSpec, targets: int) -> None:
        """``targets`` is the number of target tensors. Raises SettingError for ``reduction="none"`` and for a loss with
        parameters."""
        super().__init__()
        loss, reduction = spec.loss, getattr(spec.loss, "reduction", "mean")
        if reduction == "none":
            raise SettingError(f'{loss} returns one number a row; use reduction="mean" or reduction="sum"')
        if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
            raise SettingError(
                f"the loss {type(loss).__name__} has parameters, which would not be trained; move them "
                "into the last layer"
            )
        self._counts_own_units = _counts_own_units(spec)
        if self._counts_own_units:
            # the same as its mean times its units, but also a number where all targets are ignored
            loss, reduction = copy.copy(loss), "sum"
            loss.reduction = reduction  # type: ignore[attr-defined]
        self._loss, self._spec, self._targets, self._is_sum = loss, spec, targets, reduction == "sum"
        self._metrics = metrics_of(spec)
        self.metric_count = max(1, len(self._metrics))

    def forward(self, *outputs_and_targets: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's outputs, then the targets -> (objective, its detached metrics); bf16 outputs become fp32.

        It reads no value of a tensor, for which the host would wait in each micro-batch.
        """
        tensors = tuple(tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in outputs_and_targets)
        if isinstance(tensors[0], FakeTensor) and tensors[0].is_cpu:
            # an estimate of costs; your metric may read values
            objective = self._loss(*tensors)
            return objective, objective.detach()
        first = len(tensors) - self._targets
        units = self._units(tensors[first:] or tensors)
        if isinstance(units, Tensor) and not self._counts_own_units:
            for output in tensors[:first]:
                if output.requires_grad:  # the gradient of a mean over nothing is not a number
                    output.register_hook(partial(torch.where, units == 0, 0))  # type: ignore[no-untyped-call]
        objective = self._loss(*tensors)
        if not isinstance(objective, Tensor):
            raise TypeError(f"it returned a {type(objective).__name__}; return a tensor, without .item()")
        objective = objective if self._is_sum else torch.as_tensor(_sum(objective, units))
        if not self._metrics:
            return objective, objective.detach()
        with torch.no_grad():
            sums = []
            for name, metric in self._metrics.items():
                try:
                    value = torch.as_tensor(_sum(metric(*tensors), units), dtype=objective.dtype)
                except Exception as error:
                    raise SettingError(f"the metric {name} fails or returns no number: {typed_line(error)}") from error
                if value.dim():
                    raise SettingError(
                        f"the metric {name} returns a tensor of shape {tuple(value.shape)}; it must be one number, a "
                        "mean over rows"
                    )
                sums.append(value.to(objective.device))
        return objective, torch.stack(sums) if len(sums) > 1 else sums[0]

    def _units(self, targets: Tensors) -> Tensor | float:
        """Returns ``units_of`` the targets: a number if it follows from shapes, otherwise a tensor on their device."""
        found = _counted(self._spec, self._loss, targets)
        if self._spec.units is None and not self._counts_own_units:
            return found
        if isinstance(found, Tensor):
            return found.to(targets[-1].device, non_blocking=True)
        return torch.full((), found, dtype=torch.float64, device=targets[-1].device)


def metrics_of(spec: TrainSpec) -> dict[str, Callable[..., Tensor]]:
    """Returns the spec's metrics by name: a single one has that of its function, ``metric`` if that is none.

    Raises SettingError for anything else than functions, and for names that a run's other metrics have.
    """
    if spec.metric is None or callable(spec.metric):
        name = getattr(spec.metric, "__name__", "")
        own = name if name.isidentifier() and name not in RESERVED else "metric"
        return {} if spec.metric is None else {own: spec.metric}
    assert isinstance(spec.metric, Mapping), "checked when the spec was loaded"
    for name, metric in spec.metric.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED or not callable(metric):
            raise SettingError(
                f"metric {name!r} cannot be reported; write names of letters, digits and _, other than "
                f"{', '.join(RESERVED)}, with functions"
            )
    return dict(spec.metric)


def _sum(mean: Tensor | float, units: Tensor | float) -> Tensor | float:
    """Returns a mean times its units; 0 for a mean over nothing, which is not a number."""
    if not isinstance(units, Tensor):
        return mean * units
    dtype = torch.result_type(mean, 1.0) if isinstance(mean, Tensor) else torch.float64
    return torch.where(units == 0, 0, mean * units.to(dtype))  # as torch multiplies by a number


def _counts_own_units(spec: TrainSpec) -> bool:
    """Whether the loss is torch's cross entropy with a mean over the targets that it does not ignore."""
    return spec.units is None and type(spec.loss) in CROSS_ENTROPIES and spec.loss.reduction == "mean"  # type: ignore[attr-defined]


def units_of(spec: TrainSpec, targets: Tensors) -> float:
    """Returns the units of rows: what their loss is a mean over.

    By default the rows. For torch's cross entropy what its own mean divides by: the targets that are not ignored, each
    with the weight of its class.
    """
    return float(_counted(spec, spec.loss, targets))


def _counted(spec: TrainSpec, loss: Any, targets: Tensors) -> Tensor | float:
    """Returns the units that ``spec`` counts, or a cross entropy whose weights are where the targets are."""
    if spec.units is not None:
        units = spec.units(*targets)
        if isinstance(units, Tensor) and units.numel() != 1:
            raise SettingError(f"units returns a tensor of shape {tuple(units.shape)}; it must be one number: .sum()")
        return units
    if not _counts_own_units(spec):
        return float(len(targets[-1]))
    labels, weight = targets[-1], loss.weight
    if labels.is_floating_point() and labels.dim() == 1:
        raise ValueError("class numbers must be integers; convert the targets with .long()")
    if labels.is_floating_point():  # a probability for each class
        return float(labels.numel() / labels.shape[1])
    counted = labels != loss.ignore_index
    if weight is None:
        weights: Tensor = counted
    elif is_host(labels.device):
        weights = weight[labels[counted]]
    else:  # a mask would make the host wait: its shape depends on values
        weights = torch.where(counted, weight[labels.where(counted, 0)], 0)
    return weights.sum()
