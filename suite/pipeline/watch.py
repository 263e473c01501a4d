"""Where numbers first went bad: a step walked again with every layer looked at.

    forward    layer 0 -> 1 -> 2 -> NaN -> NaN -> loss NaN      the first layer whose output is not finite made it
    backward   layer 0 <- NaN <- 2 <- 3 <- loss                 the last layer, in the model's order, whose gradients
                                                                are not finite made it

A step is a function of the weights, the mini-batch and the seeds, so the second walk meets what the first one met.
Looking costs a pass over every tensor, which is why it is done only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from suite.pipeline.action import Action
from suite.pipeline.layers import as_tuple
from suite.pipeline.step import Executor

Look = Callable[[Tensor | None], None]


class Hook(Protocol):
    """What can be taken away again."""

    def remove(self) -> None:
        """Takes it away."""


@dataclass(frozen=True, order=True)
class Sighting:
    """Numbers that are not finite, where one worker met them. The least of many is where they came from."""

    backward: bool
    order: int
    """Of the layer: forward the first comes first, backward the last."""
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
def watching(executor: Executor) -> Iterator[list[Sighting]]:
    """A context in which an executor's layers are looked at; yields the list that their sightings go to."""
    seen: list[Sighting] = []
    hooks = list(_hooks(executor, seen))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(executor: Executor, seen: list[Sighting]) -> Iterator[Hook]:
    stage = executor.stage
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        name = type(layer).__name__
        returned = _into(_looker(executor, seen, True, index, f"{name}, its input's gradient"))
        yield layer.register_forward_pre_hook(returned)
        if hasattr(layer, "score"):
            yield _Scored(layer, returned)
        yield layer.register_forward_hook(_out_of(_looker(executor, seen, False, index, f"{name}, its output")))
        for part, parameter in layer.named_parameters():
            if not parameter.requires_grad:  # frozen: it gets no gradient
                continue
            yield parameter.register_hook(_looker(executor, seen, True, index, f"{name}, the gradient of {part}"))
    if stage.loss is not None:
        last = stage.indices[-1]
        look = _looker(executor, seen, False, last, f"{type(stage.layers[-1]).__name__} or the loss behind it")
        yield stage.loss.register_forward_hook(_out_of(look))


class _Scored:
    """A hook before a last layer's ``score``, which stands in for its ``forward``."""

    def __init__(self, layer: nn.Module, before: Callable[[nn.Module, Any], None]) -> None:
        self._layer, score = layer, cast(Callable[..., Any], layer.score)

        def watched(loss: nn.Module, inputs: Any, targets: Any) -> Any:
            before(layer, inputs)
            return score(loss, inputs, targets)

        layer.__dict__["score"] = watched

    def remove(self) -> None:
        """Leaves the class's own."""
        del self._layer.__dict__["score"]


def _into(look: Look) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, inputs: Any) -> None:
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(look)

    return hook


def _out_of(look: Look) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in as_tuple(output):
            if tensor.is_floating_point():
                look(tensor)

    return hook


def _looker(
    executor: Executor, seen: list[Sighting], backward: bool, index: int, what: str
) -> Look:  # fmt: skip
    place = executor.place

    def look(tensor: Tensor | None) -> None:
        if tensor is None or not tensor.numel():  # autograd gives None for a gradient that was put off
            return
        low, high = torch.aminmax(tensor.detach())  # NaN where one is; a mask of a large tensor might find no room
        if math.isfinite(low) and math.isfinite(high):
            return
        action = executor.doing.what
        micro_batch = action.micro_batch if isinstance(action, Action) else -1
        order = -index if backward else index
        seen.append(Sighting(backward, order, micro_batch, index, place.replica, place.stage, what))

    return look
