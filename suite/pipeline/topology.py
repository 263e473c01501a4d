"""Who is who: K x R workers, each one stage of one replica, and the process groups between them.

rank        0 1 2 | 3 4 5        K = 3, R = 2
stage       0 1 2 | 0 1 2        neighbours in a replica are neighbours in rank
replica     0 0 0 | 1 1 1
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker stands."""

    rank: int
    stages: int
    replicas: int

    @property
    def stage(self) -> int:
        """k in 0..K-1."""
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        """r in 0..R-1."""
        return self.rank // self.stages

    @property
    def first(self) -> bool:
        """Whether it feeds the pipeline."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it holds the loss."""
        return self.stage == self.stages - 1

    @property
    def speaks(self) -> bool:
        """Whether it alone writes the run's record: the last stage of the first replica, where the loss is."""
        return self.last and self.replica == 0

    def rank_of(self, replica: int, stage: int) -> int:
        """Returns the rank that holds a stage."""
        return replica * self.stages + stage

    def __str__(self) -> str:
        return f"replica {self.replica}, stage {self.stage}"


@dataclass(frozen=True)
class Groups:
    """The process groups of one worker.

    Activations and gradients have groups of their own: a NCCL communicator runs its messages one after the other, and a
    gradient receive posted ahead would block the activations behind it. So has each turn, and the way from one turn to
    the next, where stages hold several cells.
    """

    activations: tuple[Group, ...]
    gradients: tuple[Group, ...]
    replicas: Group
    """The same stage in all replicas (DeepSpeed's data parallel group)."""
    stages: Group
    """All stages of this replica (DeepSpeed's model parallel group)."""

    def way(self, giver: int, taker: int, stages: int) -> int:
        """Returns which of the groups carry messages between two cells, v * K + k being the v-th of stage k."""
        turn = taker // stages
        return 2 * turn - (giver // stages < turn)


def make_groups(place: Place, timeout_s: float, turns: int = 1) -> Groups:
    """Makes the groups for stages of ``turns`` cells; every rank must call it. The default group must stand already."""
    span = timedelta(seconds=timeout_s)
    mine: dict[str, Any] = {}
    for replica in range(place.replicas):
        ranks = [place.rank_of(replica, stage) for stage in range(place.stages)]
        for name, count in (("activations", 2 * turns - 1), ("gradients", 2 * turns - 1), ("stages", 1)):
            groups = tuple(dist.new_group(ranks, timeout=span) for _ in range(count))
            if replica == place.replica:
                mine[name] = groups if name != "stages" else groups[0]
    for stage in range(place.stages):
        group = dist.new_group([place.rank_of(replica, stage) for replica in range(place.replicas)], timeout=span)
        if stage == place.stage:
            mine["replicas"] = group
    return Groups(**mine)


def backend_of(device: torch.device) -> str:
    """Returns the torch.distributed backend: gloo for the small host messages, NCCL beside it for tensors on a GPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
