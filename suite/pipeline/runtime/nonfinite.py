"""Finds where non-finite numbers first appeared: runs a step again and inspects every layer.

    forward    layer 0 -> 1 -> 2 -> NaN -> NaN -> loss NaN      the source: the first layer whose output is not finite
    backward   layer 0 <- NaN <- 2 <- 3 <- loss                 the source: the last layer, in the model's order, whose
                                                                gradients are not finite

A step is a function of the weights, the mini-batch and the seeds, so the second run is equal to the first. Inspection
costs a pass over every tensor, so it is done only after a non-finite step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from suite.pipeline.model.layers import as_tuple
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.schedule.action import Action

Inspect = Callable[[Tensor | None], None]


@dataclass(frozen=True, order=True)
class NonFiniteRecord:
    """Where one worker found non-finite numbers. The smallest record of a step is their source."""

    backward: bool
    order: int
    """Of the layer: the first layer comes first in a forward, the last in a backward."""
    micro_batch: int
    """Of the replica's share."""
    layer: int
    replica: int
    stage: int
    what: str = field(compare=False)

    def __str__(self) -> str:
        where = f"replica {self.replica}, stage {self.stage}, micro-batch {self.micro_batch}"
        return f"{where}, layer {self.layer}: {self.what}"


@contextmanager
def find_nonfinite(executor: Executor) -> Iterator[list[NonFiniteRecord]]:
    """A context in which an executor's layers are inspected; yields the list of records."""
    records: list[NonFiniteRecord] = []
    with ExitStack() as stack:
        for remove_hook in _install_hooks(executor, records):
            stack.callback(remove_hook)
        yield records


def _install_hooks(executor: Executor, records: list[NonFiniteRecord]) -> Iterator[Callable[[], object]]:
    """Installs the hooks one by one; yields the function that removes each."""
    stage = executor.stage
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        name = type(layer).__name__
        on_inputs = _on_inputs(_inspector(executor, records, True, index, f"{name}, its input's gradient"))
        yield layer.register_forward_pre_hook(on_inputs).remove
        if hasattr(layer, "score"):
            yield _hook_score(layer, on_inputs)
        on_output = _on_output(_inspector(executor, records, False, index, f"{name}, its output"))
        yield layer.register_forward_hook(on_output).remove
        for part, parameter in layer.named_parameters():
            if parameter.requires_grad:  # a frozen one gets no gradient
                inspect = _inspector(executor, records, True, index, f"{name}, the gradient of {part}")
                yield parameter.register_hook(inspect).remove
    if stage.loss is not None:
        last = stage.indices[-1]
        inspect = _inspector(executor, records, False, last, f"{type(stage.layers[-1]).__name__} or the loss behind it")
        yield stage.loss.register_forward_hook(_on_output(inspect)).remove


def _hook_score(layer: nn.Module, before: Callable[[nn.Module, Any], None]) -> Callable[[], object]:
    """Calls ``before`` before a last layer's ``score``, which replaces its ``forward``; returns how to undo it."""
    score = cast(Callable[..., Any], layer.score)

    def inspected_score(loss: nn.Module, inputs: Any, targets: Any) -> Any:
        before(layer, inputs)
        return score(loss, inputs, targets)

    layer.__dict__["score"] = inspected_score
    return lambda: layer.__dict__.pop("score")


def _on_inputs(inspect: Inspect) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, inputs: Any) -> None:
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(inspect)

    return hook


def _on_output(inspect: Inspect) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in as_tuple(output):
            if tensor.is_floating_point():
                inspect(tensor)

    return hook


def _inspector(executor: Executor, records: list[NonFiniteRecord], backward: bool, index: int, what: str) -> Inspect:
    coord = executor.coord

    def inspect(tensor: Tensor | None) -> None:
        if tensor is None or not tensor.numel():  # autograd passes None for a deferred gradient
            return
        low, high = torch.aminmax(tensor.detach())  # NaN if there is one; a mask of a large tensor might not fit
        if math.isfinite(low) and math.isfinite(high):
            return
        action = executor.status.action
        micro_batch = action.micro_batch if isinstance(action, Action) else -1
        order = -index if backward else index
        records.append(NonFiniteRecord(backward, order, micro_batch, index, coord.replica, coord.stage, what))

    return inspect
