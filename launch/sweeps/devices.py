"""The devices of a Ray cluster, which a sweep's members share with other users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a sweep of plain processes does without Ray
    from launch.backends.ray_connection import Connection


@dataclass(frozen=True)
class Devices:
    """The current devices of a Ray cluster: GPUs if it has any, else CPUs."""

    kind: Literal["GPU", "CPU"]
    total: int
    free: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.total} {self.kind}s on {self.nodes} node{'' if self.nodes == 1 else 's'}"


def cluster_devices(connection: Connection) -> Devices:
    """Returns the devices of a cluster's nodes that answer."""
    kind = connection.kind()
    nodes = connection.nodes(kind)
    return Devices(kind, sum(node.total for node in nodes), sum(node.free for node in nodes), len(nodes))
