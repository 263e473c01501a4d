"""What a stage knows of the mini-batch that it runs: of each cell, and of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from suite.pipeline.model.layers import Tensors
from suite.pipeline.runtime.cell_layout import CellLayout
from suite.pipeline.runtime.p2p import Recv
from suite.pipeline.runtime.stage import CellMicroBatch
from suite.pipeline.runtime.weight_grad import DeferredGrads
from suite.pipeline.schedule.action import Action


@dataclass
class CellState:
    """One mini-batch in one cell."""

    layout: CellLayout
    posted: bool = False
    """Whether its first receives are posted."""
    recv_activations: Recv | None = None
    recv_gradients: Recv | None = None
    micro_batches: dict[int, CellMicroBatch] = field(default_factory=dict)
    """Those between forward and backward."""
    deferred: dict[int, DeferredGrads] = field(default_factory=dict)


@dataclass
class StepState:
    """One mini-batch on one stage; ``cells`` grows as its cells start, one by one."""

    step: int
    offset: int
    train: bool
    actions: list[Action]
    recomputed: set[tuple[int, int]]
    """Virtual stage and micro-batch of each ``R``."""
    splits: set[tuple[int, int]]
    """Virtual stage and micro-batch of each ``I``."""
    last_grad_actions: set[Action]
    cells: list[CellState] = field(default_factory=list)
    inputs: Sequence[Tensors] | None = None
    targets: Sequence[Tensors] | None = None
    loss_gradient: float = 0.0
    results: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    backward_begun: bool = False
