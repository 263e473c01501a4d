"""The devices that a sweep's members share: this machine's, or those of a Ray cluster with other users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from launch.backends.ray_connection import Connection, answering
from launch.sweeps.scheduler import DeviceUsage


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


@contextmanager
def connected(min_cpus: int) -> Iterator[Connection]:
    """A context with a connection to the cluster of RAY_ADDRESS. Without an address it starts Ray on this machine, with
    ``min_cpus`` CPUs or all of them if there are more, and stops it at the end of the context or process.

    Raises PlacementError when nothing answers at that address.
    """
    connection = Connection()
    connection.open(min_cpus)
    try:
        yield connection
    finally:
        connection.close()


def address_of_ray() -> str:
    """Returns the address at which other processes reach this process's cluster."""
    import ray

    return os.environ.get("RAY_ADDRESS") or str(ray.get_runtime_context().gcs_address)


@dataclass(frozen=True)
class RayDevicePool:
    """The devices of this process's cluster."""

    connection: Connection

    def usage(self) -> DeviceUsage:
        """Queries Ray, which does not tell our devices in use from those of others. Raises WorkerError when its head is
        dead."""
        with answering("which devices it has"):
            devices = cluster_devices(self.connection)
        return DeviceUsage(devices.total, devices.total - devices.free)


@dataclass(frozen=True)
class LocalDevicePool:
    """This machine's devices, used by this sweep alone."""

    total: int

    def usage(self) -> DeviceUsage:
        """Returns a constant."""
        return DeviceUsage(self.total)
