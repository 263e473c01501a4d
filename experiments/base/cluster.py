"""A cluster as plain numbers: the available machines, or declared ones."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from experiments.base.hints import command, option
from models.chunked_loss import CPU_LOGITS_BYTES, accelerator_logits_bytes
from suite.errors import SettingError
from suite.pipeline.model.topology import TransportName
from suite.pipeline.planning.devices import ASSUMED_SPEED, GIB, THIS_DEVICE, Device, find_device, known_devices
from suite.pipeline.planning.placement import Node, Placement, place
from suite.pipeline.planning.simulate import Link

NETWORK = Link(latency_s=20e-6, bytes_per_s=25e9)
"""Network of a declared cluster, and of one with GPUs that is not measured: one 200 Gbit/s port per device (HDR
InfiniBand). Our choice, between the 100 and 400 Gbit/s that clusters have."""

_COUNT = r"([1-9]\d{0,5})\s*[xX]\s*"


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
    device_names: tuple[str, ...] = ()
    """The names of its devices, if they differ: all count as one of them, with the memory of the smallest."""
    left_out: tuple[str, ...] = ()
    """The names of nodes that are not used, each with the reason."""

    def __str__(self) -> str:
        where = f" on {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        words = ("GPU" if self.kind == "gpu" else "CPU core") + ("" if self.devices == 1 else "s")
        name = words if self.device is None else self.device.name
        if self.device is not None and self.device_names:
            name = f"devices that count as {name}"
        return f"{self.devices} {name} with {self.bytes_per_device / GIB:.1f} GiB each{where}"

    def place(self, stages: int, replicas: int) -> Placement | None:
        """Returns the placement of the workers; None on one machine. Raises PlacementError when too few devices are
        free."""
        return place(self.nodes, stages, replicas) if self.nodes else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says about nodes that are left out, devices that differ, and a device of which only the memory is
        declared."""
        name = self.name if self.device is None else self.device.name
        notes = [f"left out: {node}; run `{command('doctor')}`" for node in self.left_out]
        if self.device_names:
            devices = ", ".join(self.device_names)
            notes.append(
                f"different devices ({devices}): all count as {name}, with the lowest of their rates and memories"
            )
        if name.endswith(ASSUMED_SPEED):
            size = name.removesuffix(ASSUMED_SPEED)
            notes.append(f"only a size is declared: times are those of TPUv3 cores; A100:{size} has an A100's")
        return tuple(notes)

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
        """The link between nodes: measured, otherwise that of a declared cluster; None between nodes without GPUs."""
        return self.network or (NETWORK if self.device is not None or self.kind == "gpu" else None)


def parse_cluster(text: str, this: Cluster) -> Cluster:
    """Parses a cluster such as ``16x16GiB``, ``2x8xH100``, ``4xA100-40GB``, ``H200`` or ``8xthis``, where ``this`` is
    this machine; or different devices, such as ``8xH100+2x8xA100-40GB``, which all count as the slowest.

    Raises SettingError with the format, and all devices, for anything else.
    """
    parts = [_parse_part(part, text, this) for part in text.split("+")]
    if len(parts) == 1:
        return parts[0]
    given = option("CLUSTER", repr(text))
    if THIS_DEVICE in text.lower():
        raise SettingError(f"{given} has this machine beside other devices; name its device")
    if len({part.transport for part in parts}) > 1:
        raise SettingError(f"{given} mixes GPUs and other devices, which exchange no messages; plan for one of them")
    devices = [part.device for part in parts if part.device is not None]
    device, names = _slowest(devices), tuple(dict.fromkeys(each.name for each in devices))
    sizes = [node.total for part in parts for node in part.nodes or (Node("", "", 0, part.devices),)]
    nodes = tuple(Node(str(at), f"node {at}", size, size) for at, size in enumerate(sizes))
    return Cluster(sum(sizes), device.memory_bytes, "gpu", nodes, device, device_names=names if len(names) > 1 else ())


def _slowest(devices: Sequence[Device]) -> Device:
    """Returns the slowest of several devices, with the lowest rates, slowest link and smallest memory of all."""
    slowest = min(devices, key=lambda device: (device.bf16, device.bandwidth, device.memory_bytes))
    fields = ("memory_bytes", "fp32", "bandwidth")
    least = {field: min(getattr(device, field) for device in devices) for field in fields}
    slowest_link = min(devices, key=lambda device: device.link)
    return replace(slowest, **least, link=slowest_link.link, link_name=slowest_link.link_name)


def _parse_part(part: str, text: str, this: Cluster) -> Cluster:
    """Parses one part of a cluster, such as ``2x8xA100-40GB``."""
    match = re.fullmatch(rf"(?:{_COUNT})?(?:{_COUNT})?(.*)", part.strip(), re.DOTALL)
    assert match is not None, "everything matches"
    numbers, name = [int(count) for count in match.groups()[:2] if count], match[3].strip()
    try:
        if not name:
            raise SettingError(f"it has no device; {known_devices()}")
        device = find_device(name, this.bytes_per_device)
    except SettingError as fault:
        raise SettingError(
            f"{option('CLUSTER', repr(text))} is not a cluster: {fault}; write [nodes x] devices x device, such as "
            "16x16GiB, 2x8xH100 or 4xA100-40GB, and + between different devices"
        ) from None
    kind = this.kind if name.lower() == THIS_DEVICE else "gpu"
    count = numbers[0] if len(numbers) == 2 else 1
    nodes = tuple(Node(str(at), f"node {at}", numbers[-1], numbers[-1]) for at in range(count)) if count > 1 else ()
    return Cluster(math.prod(numbers), device.memory_bytes, kind, nodes, device)
