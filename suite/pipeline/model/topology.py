"""The topology: K x R workers, each one stage of one replica, and their process groups.

rank        0 1 2 | 3 4 5        K = 3, R = 2
stage       0 1 2 | 0 1 2        neighbours in a replica are neighbours in rank
replica     0 0 0 | 1 1 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from suite.device import is_host
from suite.pipeline.model.cells import CellPlacement

Group = dist.ProcessGroup

TransportName = Literal["gloo", "nccl"]
"""What carries the tensors between stages: gloo between CPUs, NCCL between GPUs."""

MAX_CTAS = 4
"""The most thread blocks, each on a multiprocessor of its own, with which NCCL sends or receives a boundary's tensors.
By default NCCL takes up to 32, which computation then lacks. Our choice, not measured."""

MessageKind = Literal["activations", "gradients"]

CellPair = tuple[int, int]
"""Two cells that exchange messages: the first sends activations, the second sends gradients."""


@dataclass(frozen=True, slots=True)
class RankCoord:
    """The coordinates of one worker."""

    rank: int
    stages: int
    replicas: int
    cell_to_stage: tuple[int, ...] = ()
    """As in ``CellPlacement``."""

    @property
    def placement(self) -> CellPlacement:
        """Which stage has which cell."""
        return CellPlacement(self.stages, self.cell_to_stage)

    @property
    def stage(self) -> int:
        """k in 0..K-1."""
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        """r in 0..R-1."""
        return self.rank // self.stages

    @property
    def is_first(self) -> bool:
        """Whether it has the first cell, which gets the inputs."""
        return self.stage == 0

    @property
    def has_loss(self) -> bool:
        """Whether it has the last cell, which has the loss."""
        return self.stage == self.placement.loss_stage

    @property
    def is_metrics_rank(self) -> bool:
        """Whether it writes the run's metrics: the stage of the first replica that has the loss."""
        return self.has_loss and self.replica == 0

    def rank_of(self, replica: int, stage: int) -> int:
        return replica * self.stages + stage

    def __str__(self) -> str:
        return f"replica {self.replica}, stage {self.stage}"


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of one worker.

    Activations and gradients have separate groups: a NCCL communicator runs its messages one after another, so a
    pre-posted gradient receive would block the activations behind it. For the same reason each pair of cells has its
    own group where several connect the same two stages.
    """

    activations: tuple[Group, ...]
    gradients: tuple[Group, ...]
    data_parallel: Group
    """The same stage in all replicas."""
    pipeline: Group
    """All stages of this replica (DeepSpeed's model parallel group)."""
    p2p_group_index: Mapping[CellPair, int]
    """Index in ``activations`` and ``gradients`` of the group for a pair's messages."""


def p2p_group_indices(pairs: Iterable[CellPair], placement: CellPlacement) -> dict[CellPair, int]:
    """Returns a group index for each pair of cells; pairs that connect the same two stages have different ones."""
    used: Counter[frozenset[int]] = Counter()
    indices = {}
    for pair in sorted(set(pairs)):
        ends = frozenset(placement.stage_of(cell) for cell in pair)
        assert len(ends) == 2, f"cells {pair} are on the same of {placement.stages} stages"
        indices[pair] = used[ends]
        used[ends] += 1
    return indices


def make_groups(coord: RankCoord, timeout_s: float, pairs: Iterable[CellPair] = ()) -> ProcessGroups:
    """Creates the process groups for messages between the cells of ``pairs``, at least one for each direction. All
    ranks must call it with the same arguments, after ``init_process_group``."""
    timeout = timedelta(seconds=timeout_s)
    new_group = partial(dist.new_group, timeout=timeout)
    indices = p2p_group_indices(pairs, coord.placement)
    p2p_groups = 1 + max(indices.values(), default=0)

    def new_p2p_groups(ranks: list[int]) -> tuple[Group, ...]:
        return tuple(new_group(ranks, pg_options=_p2p_options(timeout)) for _ in range(p2p_groups))

    for replica in range(coord.replicas):
        ranks = [coord.rank_of(replica, stage) for stage in range(coord.stages)]
        made = new_p2p_groups(ranks), new_p2p_groups(ranks), new_group(ranks)
        if replica == coord.replica:
            activations, gradients, pipeline = made
    for stage in range(coord.stages):
        group = new_group([coord.rank_of(replica, stage) for replica in range(coord.replicas)])
        if stage == coord.stage:
            data_parallel = group
    return ProcessGroups(activations, gradients, data_parallel, pipeline, indices)


def _p2p_options(timeout: timedelta) -> Any:
    """Returns the options of a group for messages between stages on NCCL, or None: few thread blocks, because a message
    waits on the device for its other side, and a stream that goes first once both are there."""
    if "nccl" not in dist.get_backend_config():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    options._timeout = timeout
    return options


def warm_up_order(
    pairs: Iterable[CellPair], stage: int, placement: CellPlacement
) -> Iterator[tuple[MessageKind, CellPair, bool]]:
    """Yields a stage's warm-up messages in order: the kind, the pair of cells, and whether this stage sends.

    All stages go through the pairs in the same order, so there is no circular wait. Neighbours come first, those after
    an even cell before those after an odd one, so that half of them meet at the same time: a communicator takes a
    second or more.

        stage   0 - 1   2 - 3   4    then   0   1 - 2   3 - 4
    """
    for kind in get_args(MessageKind):
        for pair in sorted(pairs, key=lambda pair: (pair[1] - pair[0] > 1, pair[0] % 2, pair)):
            if stage in map(placement.stage_of, pair):
                yield kind, pair, placement.stage_of(pair[0]) == stage


def warm_up(coord: RankCoord, groups: ProcessGroups, device: torch.device) -> None:
    """Exchanges a message in each direction's group between all stages that communicate, one between the replicas of
    each stage, and one between all workers, before receives are posted.

    NCCL creates a communicator at its first message and blocks until all its ranks join: a pre-posted gradient receive
    would wait for the first gradient before the first activation could leave. gloo does not need this.
    """
    if is_host(device):
        return
    token = torch.zeros(1, device=device)
    for kind, pair, sends in warm_up_order(groups.p2p_group_index, coord.stage, coord.placement):
        group = getattr(groups, kind)[groups.p2p_group_index[pair]]
        peer = coord.rank_of(coord.replica, coord.placement.stage_of(pair[sends]))
        if sends:
            dist.send(token, peer, group=group)
        else:
            dist.recv(token, peer, group=group)
    if coord.replicas > 1:
        dist.all_reduce(token, group=groups.data_parallel)
    dist.all_reduce(token)


def transport_of(device: torch.device) -> TransportName:
    """Returns what carries tensors between stages on such devices."""
    return "gloo" if is_host(device) else "nccl"


def backend_of(device: torch.device) -> str:
    """Returns the torch.distributed backend: gloo for host tensors, and NCCL for tensors on a GPU."""
    return "gloo" if transport_of(device) == "gloo" else f"cpu:gloo,{device.type}:nccl"
