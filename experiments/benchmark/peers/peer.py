"""A contender of the benchmark: an object in each worker process that can run one step.

build(seat)    in every worker of the group, in the same order of contenders, as it may make process groups
step()         forward and backward of one mini-batch of M micro-batches a replica, gradients averaged over replicas
gradients()    what this worker then holds, by (layer, name): d loss / d parameter, the loss being the summed
               objective of all replicas' micro-batches divided by the work's weight
clear()        drops them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.benchmark.peers.work import Work
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.schedule.config import ScheduleConfig

Gradients = dict[tuple[int, str], Tensor]


class Runner(Protocol):
    """A contender in one worker process."""

    def step(self) -> None:
        """Runs forward and backward of one mini-batch. Returns when this worker's part is done."""

    def gradients(self) -> Gradients:
        """Returns the gradients of this worker's parameters, after a step. All workers call it."""

    def clear(self) -> None:
        """Drops all gradients."""


@dataclass(frozen=True)
class BenchContext:
    """A contender's inputs in one worker."""

    coord: RankCoord
    groups: ProcessGroups
    work: Work
    cells: dict[int, tuple[int, ...]]
    """Layers of each part of the model, by the number of parts: K, and 2K for those with two stages a process."""
    plans: dict[str, tuple[tuple[int, ...], ScheduleConfig]]
    """Cells and schedule of the planned contenders, by name."""
    inputs: Tensors
    """Of this replica's share of the mini-batch."""
    targets: Tensor

    def objective(self, loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns (outputs, targets) of a micro-batch -> its part of the mini-batch's mean loss."""
        weight = self.work.weight()

        def part(outputs: Tensor, targets: Tensor) -> Tensor:
            objective: Tensor = loss(outputs, targets)[0]
            return objective / weight

        return part


def refuse_none(work: Work) -> None:
    """Accepts every work."""


@dataclass(frozen=True)
class Entrant:
    """One contender. It is sent to other processes, so ``build`` and ``refuse`` must be importable by name."""

    name: str
    build: Callable[[BenchContext], Runner]
    recomputes: bool
    """Whether it recomputes activations."""
    ours: bool = False
    settings: tuple[tuple[str, str | int], ...] | None = None
    """``PipelineSettings`` of a planned contender."""
    memory_of: str | None = None
    """The contender whose planned memory limits this one's plan; None for no limit."""
    parts: int = 1
    """Stages per process."""
    works: tuple[str, ...] = ()
    """Names of the works that it runs; empty for all."""
    refuse: Callable[[Work], str | None] = refuse_none
    """Returns why it cannot run a work, or None."""
    peak: bool = True
    """Whether its peak memory is measured, which works only for allocations of a worker's main thread."""


def mean_over_replicas(context: BenchContext, gradients: Gradients) -> None:
    """Sums gradients over replicas in place; each replica's gradients are of its part of the mean loss."""
    if context.coord.replicas == 1:
        return
    import torch.distributed as dist

    tensors = list(gradients.values())
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=context.groups.replicas)
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()
