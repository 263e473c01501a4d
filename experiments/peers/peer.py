"""What a contender of the benchmark is: something built in each worker process that can do one step.

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

from experiments.peers.work import Work
from suite.pipeline.layers import Tensors
from suite.pipeline.recipe import Recipe
from suite.pipeline.topology import Groups, Place

Gradients = dict[tuple[int, str], Tensor]


class Runner(Protocol):
    """A contender in one worker process."""

    def step(self) -> None:
        """Forward and backward of one mini-batch. Returns when this worker has nothing more to do for it."""

    def gradients(self) -> Gradients:
        """Returns the gradients of this worker's parameters, after a step. All workers call it."""

    def clear(self) -> None:
        """Drops all gradients."""


@dataclass(frozen=True)
class Seat:
    """What a worker gives a contender to build from."""

    place: Place
    groups: Groups
    work: Work
    cells: dict[int, tuple[int, ...]]
    """Layers of each part of the model, by the number of parts: K, and 2K for those with two stages a process."""
    plans: dict[str, tuple[tuple[int, ...], Recipe]]
    """Cells and recipe of those that are planned, by name."""
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
    """Can do every work."""


@dataclass(frozen=True)
class Contender:
    """One line of the benchmark. It goes to other processes, so ``build`` and ``refuse`` are importable by name."""

    name: str
    build: Callable[[Seat], Runner]
    rebuilds: bool
    """Whether activations are thrown away and built again."""
    ours: bool = False
    settings: tuple[tuple[str, str | int], ...] | None = None
    """Of ``PipelineSettings``, for those that are planned."""
    memory_of: str | None = None
    """The contender in whose planned memory this one is planned; None: as much as it likes."""
    parts: int = 1
    """Stages a process."""
    works: tuple[str, ...] = ()
    """Names of the works it has a row for; empty for all."""
    refuse: Callable[[Work], str | None] = refuse_none
    """Returns why it cannot do a work, in words, or None."""
    peak: bool = True
    """Whether its bytes can be seen: the allocator is watched in a worker's main thread only."""


def mean_over_replicas(seat: Seat, gradients: Gradients) -> None:
    """Sums gradients over replicas, in place: each replica's are of its own part of the mean loss."""
    if seat.place.replicas == 1:
        return
    import torch.distributed as dist

    tensors = list(gradients.values())
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=seat.groups.replicas)
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()
