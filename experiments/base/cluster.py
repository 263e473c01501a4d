"""A cluster as plain numbers: the available machines, or declared ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from models.chunked_loss import CPU_LOGITS_BYTES, accelerator_logits_bytes
from suite.errors import SettingError
from suite.pipeline.model.topology import TransportName
from suite.pipeline.planning.devices import DEVICES, GIB, Device, find_device
from suite.pipeline.planning.placement import Node, Placement, place
from suite.pipeline.planning.simulate import Link

NETWORK = Link(latency_s=20e-6, bytes_per_s=25e9)
"""Network of a declared cluster: one 200 Gbit/s port per device (HDR InfiniBand). Our choice, between the 100 and 400
Gbit/s that clusters have."""


@dataclass(frozen=True)
class Cluster:
    """``devices`` in total: accelerators if ``kind`` is gpu, else CPU cores (each with its share of the memory)."""

    devices: int
    bytes_per_device: int
    kind: Literal["cpu", "gpu"]
    nodes: tuple[Node, ...] = ()
    """The nodes of a cluster of several machines; empty for one machine."""
    device: Device | None = None
    """Properties of a declared device; None for available devices, which are measured."""
    network: Link | None = None
    """The measured link between nodes."""
    reduction: Link | None = None
    """The measured all-reduce over workers of different nodes. Its rate counts the bytes that each worker sends."""
    name: str = ""
    """Name of the available devices, if known."""
    has_bf16: bool = True
    """Whether all GPUs multiply bf16."""

    def __str__(self) -> str:
        where = f" on {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        word = ("GPU" if self.kind == "gpu" else "CPU core") if self.device is None else self.device.name
        return (
            f"{self.devices} {word}{'' if self.devices == 1 or self.device is not None else 's'} "
            f"with {self.bytes_per_device / GIB:.1f} GiB each{where}"
        )

    def place(self, stages: int, replicas: int) -> Placement | None:
        """Returns the placement of the workers; None on one machine. Raises PlacementError when too few devices are
        free."""
        return place(self.nodes, stages, replicas) if self.nodes else None

    @property
    def transport(self) -> TransportName:
        """What carries messages between its devices."""
        is_cuda = self.kind == "gpu" if self.device is None else self.device.is_cuda
        return "nccl" if is_cuda else "gloo"

    @property
    def logits_bytes(self) -> int:
        """The size of logits that a device computes at once (``models.chunked_loss``)."""
        return CPU_LOGITS_BYTES if self.kind == "cpu" else accelerator_logits_bytes(self.bytes_per_device)

    @property
    def between(self) -> Link | None:
        """The link between nodes: measured, or of a declared cluster; None if unknown."""
        return self.network or (NETWORK if self.device is not None else None)


def parse_cluster(text: str, this: Cluster) -> Cluster:
    """Parses a cluster such as ``16x16GiB``, ``2x8xH100``, ``H200`` or ``8xthis``, where ``this`` is this machine.

    Raises SettingError with the format and examples for anything else.
    """
    *counts, name = re.split("[xX]", text)
    form = "write [nodes x] devices x device, such as 16x16GiB, 2x8xH100 or 8xTPUv3"
    if len(counts) > 2 or not all(re.fullmatch(r"[1-9]\d{0,5}", count.strip()) for count in counts):
        raise SettingError(f"CLUSTER={text!r} is not a cluster; {form}")
    if not name.strip():
        raise SettingError(f"CLUSTER={text!r} has no device; {form}; devices are {', '.join(DEVICES)} or a size")
    try:
        device = find_device(name.strip(), this.bytes_per_device)
    except SettingError as fault:
        raise SettingError(f"CLUSTER={text!r} is not a cluster: {fault}; {form}") from None
    numbers = [int(count) for count in counts]
    kind = this.kind if name.strip().lower() == "this" else "gpu"
    count = numbers[0] if len(numbers) == 2 else 1
    nodes = tuple(Node(str(at), f"node {at}", numbers[-1], numbers[-1]) for at in range(count)) if count > 1 else ()
    return Cluster(math.prod(numbers), device.memory_bytes, kind, nodes, device)
