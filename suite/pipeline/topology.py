"""Who is who: K x R workers, each one stage of one replica, and the process groups between them.

rank        0 1 2 | 3 4 5        K = 3, R = 2
stage       0 1 2 | 0 1 2        neighbours in a replica are neighbours in rank
replica     0 0 0 | 1 1 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup

CellPair = tuple[int, int]
"""Two cells with a lane between them: the one that sends activations, and the one that sends gradients back."""


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
    gradient receive posted ahead would block the activations behind it. So has each lane, where several connect the
    same two stages.
    """

    activations: tuple[Group, ...]
    gradients: tuple[Group, ...]
    replicas: Group
    """The same stage in all replicas (DeepSpeed's data parallel group)."""
    stages: Group
    """All stages of this replica (DeepSpeed's model parallel group)."""
    p2p_group_index: Mapping[CellPair, int] = field(default_factory=dict)
    """Which group of ``activations`` and of ``gradients`` carries a lane's messages."""


def p2p_group_indices(lanes: Iterable[CellPair], stages: int) -> dict[CellPair, int]:
    """Returns for each lane the group that carries it: lanes that connect the same two stages have one each."""
    used: Counter[frozenset[int]] = Counter()
    indices = {}
    for lane in sorted(set(lanes)):
        ends = frozenset(cell % stages for cell in lane)
        assert len(ends) == 2, f"lane {lane} begins and ends on one of {stages} stages"
        indices[lane] = used[ends]
        used[ends] += 1
    return indices


def make_groups(place: Place, timeout_s: float, lanes: Iterable[CellPair] = ()) -> Groups:
    """Makes the groups for messages over ``lanes``, one a direction where there are none; every rank must call it with
    the same. The default group must stand already."""
    span = timedelta(seconds=timeout_s)
    indices = p2p_group_indices(lanes, place.stages)
    p2p_groups = 1 + max(indices.values(), default=0)
    mine: dict[str, Any] = {}
    for replica in range(place.replicas):
        ranks = [place.rank_of(replica, stage) for stage in range(place.stages)]
        for name, count in (("activations", p2p_groups), ("gradients", p2p_groups), ("stages", 1)):
            groups = tuple(dist.new_group(ranks, timeout=span) for _ in range(count))
            if replica == place.replica:
                mine[name] = groups if name != "stages" else groups[0]
    for stage in range(place.stages):
        group = dist.new_group([place.rank_of(replica, stage) for replica in range(place.replicas)], timeout=span)
        if stage == place.stage:
            mine["replicas"] = group
    return Groups(**mine, p2p_group_index=indices)


def backend_of(device: torch.device) -> str:
    """Returns the torch.distributed backend: gloo for the small host messages, NCCL beside it for tensors on a GPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
