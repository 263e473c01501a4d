"""Finds where non-finite numbers first appeared: runs a step again and inspects every layer.

    forward    layer 0 -> 1 -> 2 -> NaN -> NaN -> loss NaN      the source: the first layer whose output is not finite
    backward   layer 0 <- NaN <- 2 <- 3 <- loss                 the source: the last layer, in the model's order, whose
                                                                gradients are not finite

A step is a function of weights, mini-batch, seeds, and buffers that forwards change. Without these the second run is
equal to the first. Inspection costs a pass over every tensor, so it is done only after a non-finite step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from suite.pipeline.runtime.executor import Executor
from suite.pipeline.runtime.layer_hooks import Place, watch_tensors
from suite.pipeline.schedule.action import Action


@dataclass(frozen=True, order=True)
class NonFiniteRecord:
    """Where one worker found non-finite numbers. The smallest record of a step is their source."""

    backward: bool
    order: int
    """The layer's place: the first layer comes first in a forward, the last in a backward."""
    micro_batch: int
    """Its number in the replica's share."""
    layer: int
    replica: int
    stage: int
    what: str = field(compare=False)
    action: str = field(compare=False)

    def __str__(self) -> str:
        where = f"replica {self.replica}, stage {self.stage}, micro-batch {self.micro_batch}"
        return f"{where}, layer {self.layer}: {self.what}, in action {self.action}"


@contextmanager
def find_nonfinite(executor: Executor) -> Iterator[list[NonFiniteRecord]]:
    """A context in which an executor's layers are inspected; yields the list of records."""
    records: list[NonFiniteRecord] = []
    coord = executor.coord

    def inspect(place: Place, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        low, high = torch.aminmax(tensor)  # NaN if there is one; a mask of a large tensor might not fit
        if math.isfinite(low) and math.isfinite(high):
            return
        action = executor.status.action
        micro_batch = action.micro_batch if isinstance(action, Action) else -1
        order = -place.layer if place.is_backward else place.layer
        of_layer = " or the loss behind it" if place.what.startswith("loss") else f", {place.what}"
        what = executor.stage.types[place.layer] + of_layer
        where = (place.layer, coord.replica, coord.stage)
        records.append(NonFiniteRecord(place.is_backward, order, micro_batch, *where, what, str(action)))

    with watch_tensors(executor.stage.by_index, executor.stage.loss, inspect):
        yield records
