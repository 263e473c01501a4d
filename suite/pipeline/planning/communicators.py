"""Bytes that NCCL takes on a worker's GPU beside torch's allocator, from the number of its communicators.

All of them are declared, not measured; NCCL allocates them when a communicator is first used. A cost measurement has
none yet, so its process is smaller than a run's.

    point-to-point   two for each pair of cells that exchange messages (``suite.pipeline.model.topology``)
    collective       all workers; the replicas of a stage; the stages that hold a tied parameter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import MAX_CTAS, CellPair

P2P_CHANNEL_BYTES = 20 << 20
"""NCCL's log on H100s shows buffers of 10 MiB and 2 MiB a channel and peer (github.com/NVIDIA/nccl/issues/1685). A
communicator also shares 8 MiB a channel among its peers on the network: 512 MiB for 64 channels (issue 2363)."""

P2P_BYTES = MAX_CTAS * P2P_CHANNEL_BYTES
"""Of a point-to-point communicator: each thread block has a channel."""

COLLECTIVE_BYTES = 688 * 10**6
"""Of a communicator for collectives, which has all channels: reported for 3 and 4 A100s with NVLink, and 544 MB for two
(github.com/NVIDIA/nccl/issues/964). We assume it for other GPUs and for any number of nodes."""


def p2p_communicators(pairs: Sequence[CellPair], placement: CellPlacement) -> list[int]:
    """Returns how many point-to-point communicators each stage has: for each of its pairs of cells one for activations
    and one for gradients."""
    ends = Counter(placement.stage_of(cell) for pair in pairs for cell in pair)
    return [2 * ends[stage] for stage in range(placement.stages)]


def collective_bytes(stages: int, replicas: int, tied: int) -> int:
    """Returns the bytes of a worker's communicators for collectives, for a number of ``tied`` parameters."""
    groups = (stages * replicas > 1) + (replicas > 1) + (tied if stages > 1 else 0)
    return groups * COLLECTIVE_BYTES
