"""The devices that a sweep's members share: this machine's, or those of a Ray cluster that others may use too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from launch.cluster.connection import Connection, answering
from launch.sweeps.lanes import Share


@dataclass(frozen=True)
class Devices:
    """What a Ray cluster has now: GPUs if it has any, else CPUs."""

    kind: Literal["GPU", "CPU"]
    total: int
    free: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.total} {self.kind}s on {self.nodes} node{'' if self.nodes == 1 else 's'}"


def devices_of(connection: Connection) -> Devices:
    """Returns the devices of the nodes of a cluster that answer."""
    kind = connection.kind()
    nodes = connection.nodes(kind)
    return Devices(kind, sum(node.total for node in nodes), sum(node.free for node in nodes), len(nodes))


@contextmanager
def connected(least: int) -> Iterator[Connection]:
    """A context in which this process is connected to the cluster of RAY_ADDRESS; without one, to a Ray of ``least``
    CPUs or as many as there are, that is started here and ends with the context, or with this process.

    Raises PlacementError when nothing answers at that address.
    """
    connection = Connection()
    connection.open(least)
    try:
        yield connection
    finally:
        connection.close()


def address_of_ray() -> str:
    """Returns the address by which other processes reach the cluster that this one is connected to."""
    import ray

    return os.environ.get("RAY_ADDRESS") or str(ray.get_runtime_context().gcs_address)


@dataclass(frozen=True)
class OnRay:
    """The devices of the cluster that this process is connected to."""

    connection: Connection

    def look(self) -> Share:
        """Asks Ray. Devices in use are others' or our own: Ray does not say whose. Raises WorkerError when its head is
        gone."""
        with answering("which devices there are"):
            now = devices_of(self.connection)
        return Share(now.total, now.total - now.free)


@dataclass(frozen=True)
class Here:
    """This machine's devices, which nobody is asked for."""

    total: int

    def look(self) -> Share:
        """Always the same."""
        return Share(self.total)
