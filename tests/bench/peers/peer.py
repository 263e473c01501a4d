"""An entrant of the benchmark: an object in each worker process that can run one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from tests.bench.peers.workload import BenchWorkload

Gradients = dict[tuple[int, str], Tensor]


class Runner(Protocol):
    """An entrant in one worker process."""

    def step(self) -> None:
        """Runs forward and backward of M micro-batches per replica, and reduces gradients over replicas. Returns when
        this worker's part is done."""

    def gradients(self) -> Gradients:
        """Returns this worker's gradients by (layer, name), after a step; all workers call it. The loss is the summed
        objective of all replicas' micro-batches, divided by the workload's divisor."""

    def clear(self) -> None:
        """Drops all gradients."""


@dataclass(frozen=True)
class BenchContext:
    """An entrant's inputs in one worker."""

    coord: RankCoord
    groups: ProcessGroups
    work: BenchWorkload
    cells: dict[int, tuple[int, ...]]
    """Layers per cell, by the number of cells: K, and 2K for entrants with two stages per process."""
    plans: dict[str, tuple[tuple[int, ...], ScheduleConfig]]
    """Cells and schedule of the planned entrants, by name."""
    inputs: Tensors
    """This replica's share of the mini-batch."""
    targets: Tensor

    @property
    def batch(self) -> ReplicaBatch:
        return self.work.split(self.inputs, self.targets, self.coord.replica)

    def objective(self, loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns a function: (outputs, targets) of a micro-batch -> its part of the mini-batch's mean loss."""
        divisor = self.work.divisor
        return lambda outputs, targets: loss(outputs, targets)[0] / divisor


@dataclass(frozen=True)
class Entrant:
    """One entrant. It is sent to other processes, so ``build`` must be importable by name."""

    name: str
    build: Callable[[BenchContext], Runner]
    """Called in every worker, in the same order of entrants, because it may make process groups."""
    recomputes: bool
    """Whether it recomputes activations."""
    settings: tuple[tuple[str, str | int], ...] | None = None
    """``PipelineSettings`` of an entrant of the suite, which is planned; None for a peer."""
    memory_of: str | None = None
    """The entrant whose planned memory limits this one's plan; None for no limit."""
    virtual_stages: int = 1
    """Cells per stage."""
    workloads: tuple[str, ...] = ()
    """Names of the workloads that it runs; empty for all."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why it cannot run a workload, by the workload's name."""
    threads: int = 1
    """Of a process that computes; 0: as many as there are workers."""

    def threads_of(self, work: BenchWorkload) -> int:
        return self.threads or work.stages * work.replicas


def sum_over_replicas(context: BenchContext, gradients: Gradients) -> None:
    """Sums gradients over replicas in place; each replica's gradients are of its part of the mean loss."""
    if context.coord.replicas == 1:
        return
    tensors = list(gradients.values())
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=context.groups.data_parallel)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
