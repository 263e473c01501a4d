"""The micro-batches of which layer costs are estimated and measured."""

from __future__ import annotations

from dataclasses import dataclass

from suite.pipeline.model.layers import Tensors


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of the first layer and the targets of the loss."""

    inputs: Tensors
    targets: Tensors


@dataclass(frozen=True)
class Sample:
    """Two micro-batches of a run, which may be the same."""

    typical: MicroBatch
    """A typical one: seconds are measured with it, and the operations of a step are counted."""
    largest: MicroBatch
    """The one that needs the most bytes."""
    units: float | None = None
    """The units, such as tokens, of the typical micro-batch; None: an equal share of the mini-batch."""
