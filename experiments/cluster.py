"""What the machines at hand, or those asked about, can hold: plain numbers; who finds them out is no concern here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from suite.errors import SettingError
from suite.pipeline.devices import DEVICES, Device, find_device
from suite.pipeline.placement import Node, Placement, place
from suite.pipeline.simulate import Link

GIB = 2**30

NETWORK = Link(latency_s=20e-6, bytes_per_s=25e9)
"""Between nodes of a declared cluster: one 200 Gbit/s port a device."""


@dataclass(frozen=True)
class Cluster:
    """``devices`` in all: accelerators where kind is gpu, cores where it is cpu (each with its share of the memory)."""

    devices: int
    bytes_per_device: int
    kind: Literal["cpu", "gpu"]
    nodes: tuple[Node, ...] = ()
    """Of several machines, what each has; none: one machine."""
    device: Device | None = None
    """What a declared device can do; None for devices at hand, where it is measured."""
    network: Link | None = None
    """Between nodes, as it was measured."""
    reduction: Link | None = None
    """Of a reduction over workers of different nodes, as it was measured: its bytes a second are those that go out of
    each."""
    name: str = ""
    """Of the devices at hand, where that is known."""

    def __str__(self) -> str:
        where = f" on {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        word = ("GPU" if self.kind == "gpu" else "CPU core") if self.device is None else self.device.name
        return (
            f"{self.devices} {word}{'' if self.devices == 1 or self.device is not None else 's'} "
            f"with {self.bytes_per_device / GIB:.1f} GiB each{where}"
        )

    def place(self, stages: int, replicas: int) -> Placement | None:
        """Returns where workers would go; None on one machine. Raises PlacementError when nodes have too few devices
        free."""
        return place(self.nodes, stages, replicas) if self.nodes else None

    @property
    def between(self) -> Link | None:
        """The link between nodes: measured, or of a declared cluster; None where it is not known."""
        return self.network or (NETWORK if self.device is not None else None)


def parse_cluster(text: str, this: Cluster) -> Cluster:
    """Returns the cluster that ``16x16GiB``, ``2x8xH100``, ``H200`` or ``8xthis`` means; ``this`` is this machine.

    Raises SettingError with the form and an example for anything else.
    """
    *counts, name = re.split("[xX]", text)
    form = "write [nodes x] devices x device, such as 16x16GiB, 2x8xH100 or 8xTPUv3"
    if len(counts) > 2 or not all(re.fullmatch(r"[1-9]\d{0,5}", count.strip()) for count in counts):
        raise SettingError(f"CLUSTER={text!r} is no cluster; {form}")
    if not name.strip():
        raise SettingError(f"CLUSTER={text!r} names no device; {form}, with a device of {', '.join(DEVICES)} or a size")
    try:
        device = find_device(name.strip(), this.bytes_per_device)
    except SettingError as fault:
        raise SettingError(f"CLUSTER={text!r} is no cluster: {fault}; {form}") from None
    numbers = [int(count) for count in counts]
    kind = this.kind if name.strip().lower() == "this" else "gpu"
    count = numbers[0] if len(numbers) == 2 else 1
    nodes = tuple(Node(str(at), f"node {at}", numbers[-1], numbers[-1]) for at in range(count)) if count > 1 else ()
    return Cluster(math.prod(numbers), device.memory, kind, nodes, device)
