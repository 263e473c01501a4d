"""What the machines at hand, or those asked about, can hold: plain numbers; who finds them out is no concern here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from suite.errors import SettingError
from suite.pipeline.devices import DEVICES, Device, find_device
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
    nodes: int = 1
    device: Device | None = None
    """What a declared device can do; None for the machine at hand, where it is measured."""

    def __str__(self) -> str:
        word = ("GPU" if self.kind == "gpu" else "CPU core") if self.device is None else self.device.name
        return (
            f"{self.devices} {word}{'' if self.devices == 1 or self.device is not None else 's'} "
            f"with {self.bytes_per_device / GIB:.1f} GiB each"
        )

    def link(self, stages: int) -> Link:
        """Returns the slowest link between neighbouring stages; replicas lie whole on nodes where they fit."""
        assert self.device is not None
        return self.device.messages if stages <= self.devices // self.nodes else NETWORK

    @property
    def reduce_bytes_per_s(self) -> float:
        """Of the reduction over replicas: over the network as soon as there are nodes."""
        if self.device is None:
            return math.inf
        return self.device.link if self.nodes == 1 else NETWORK.bytes_per_s


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
    return Cluster(math.prod(numbers), device.memory, kind, numbers[0] if len(numbers) == 2 else 1, device)
