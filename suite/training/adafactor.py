"""Adafactor (Shazeer and Stern, 2018, algorithms 4 to 6) that updates parameters of one shape together.

    n gradients --stack--> (n, rows, columns) --means of squares--> state of each --> n updates --> n parameters

The rule, the names of the state and its shapes are those of ``torch.optim.Adafactor``. That one updates each parameter
by itself and reads two of its norms to the host: with many layers thousands of small operations, and on a GPU as many
waits. Here norms stay on the device.

A parameter's new value has the same bits whatever else is in its batch, because which layers share a process depends on
K. torch's reductions do not promise this: one sum is split over threads, several are not. So sums over a batch are made
of elementwise additions (``_sum``), and norms are taken of each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from suite.device import is_host

BETA2_DECAY = -0.8
LEAST_SCALE = 1e-3
"""The authors' numbers, and torch's defaults."""

BATCH_BYTES = 4 << 20
"""The most bytes of parameters updated together. One of more than half is alone, and its gradient is not copied."""

BATCH_COPIES = 3
"""Temporary tensors, each as large as a batch, that are alive at once: the gradients, and of vectors their squares or
roots beside the second moments."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor without a wait of the host. Steps are counted on the host."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        """At step t the rate is ``min(lr, 1 / sqrt(t))`` times the root mean square of the parameter, at least
        ``LEAST_SCALE``; the second moment decays by ``1 - t ** BETA2_DECAY`` and its root is at least the format's
        epsilon; an update whose root mean square is above 1 is scaled down to it."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for step, batch in self._batches(parameters):
                self._update(batch, step, group)

    def _batches(self, parameters: list[Tensor]) -> list[tuple[float, list[Tensor]]]:
        """Counts a step. Returns batches of parameters that are alike, each with its step, the first of which is 1."""
        if not parameters:
            return []
        steps = [self._state_of(parameter)["step"] for parameter in parameters]
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1)
        alike: dict[Any, list[Tensor]] = {}
        for parameter, step in zip(parameters, torch.stack(steps).tolist(), strict=True):
            key = step, parameter.shape, parameter.stride(), parameter.dtype, parameter.device
            alike.setdefault(key, []).append(parameter)
        return [
            (key[0], same[begin : begin + count])
            for key, same in alike.items()
            for count in [_most_in_a_batch(same[0])]
            for begin in range(0, len(same), count)
        ]

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            shape = parameter.shape
            state["step"] = torch.zeros((), device="cpu")
            if len(shape) > 1:
                state["row_var"] = parameter.new_zeros((*shape[:-1], 1))
                state["col_var"] = parameter.new_zeros((*shape[:-2], 1, shape[-1]))
            else:
                state["variance"] = torch.zeros_like(parameter)
        return state

    def _update(self, parameters: list[Tensor], step: float, group: dict[str, Any]) -> None:
        """Updates n parameters of one shape and step; all that is batched has n as its first size."""
        shape, size = parameters[0].shape, parameters[0].numel()
        least, decay, lr = torch.finfo(parameters[0].dtype).eps, step**BETA2_DECAY, group["lr"]
        scales = torch.stack(torch._foreach_norm(parameters)).div_(size**0.5).clamp_(min=LEAST_SCALE)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        gradients = _batch([parameter.grad for parameter in parameters if parameter.grad is not None])

        def moments(name: str, means: Tensor) -> Tensor:
            of_each = [self.state[parameter][name] for parameter in parameters]
            torch._foreach_lerp_(of_each, means.unbind(), decay)
            return _batch(of_each)

        if len(shape) > 1:
            total = _sum_alone if _is_alone(parameters[0]) else _sum
            rows = moments("row_var", total(gradients * gradients, -1) / shape[-1])
            columns = moments("col_var", total(gradients * gradients, -2) / shape[-2])
            mean = (total(rows.clone(), -2) / shape[-2]).clamp_(min=least)
            roots = (rows / mean).sqrt_() * columns.sqrt()  # of few values first, not of their product
        else:
            roots = moments("variance", gradients * gradients).sqrt()
        updates = torch.div(gradients, roots.clamp_(min=least), out=roots)
        norms = torch.stack(torch._foreach_norm(updates.unbind()))
        scales.div_(norms.div_(size**0.5).clamp_(min=1)).mul_(-min(lr, 1 / step**0.5))
        torch._foreach_add_(parameters, updates.mul_(scales.view(-1, *[1] * len(shape))).unbind())


def _most_in_a_batch(parameter: Tensor) -> int:
    return max(1, BATCH_BYTES // max(1, parameter.nbytes))


def _is_alone(parameter: Tensor) -> bool:
    """Whether its size keeps a parameter from sharing a batch with any other."""
    return _most_in_a_batch(parameter) == 1


def _batch(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the tensors as one with their number as its first size: a copy, but for one that is too large for two."""
    return tensors[0].unsqueeze(0) if _is_alone(tensors[0]) else torch.stack(list(tensors))


def _sum(values: Tensor, dim: int) -> Tensor:
    """Returns the sums over a dimension, which is kept with size 1, and overwrites ``values``.

    The last half is added to the first until one is left. So the order depends on the size of the dimension alone.
    """
    while (size := values.size(dim)) > 1:
        half = size // 2
        values.narrow(dim, 0, half).add_(values.narrow(dim, size - half, half))
        values = values.narrow(dim, 0, size - half)
    return values


def _sum_alone(values: Tensor, dim: int) -> Tensor:
    """As ``_sum``, of a parameter that is always alone: on a device that is not the host torch splits a sum by its
    shape, and not over threads."""
    return _sum(values, dim) if is_host(values.device) else values.sum(dim, keepdim=True)
