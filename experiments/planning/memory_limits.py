"""How much of a device's memory a plan may use: its share of the host, less a reserve."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.workload import Measurable
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.placement import Placement

RESERVES = {"gpu": 0.05, "cpu": 0.3}
"""The share of a device's memory that plans leave free. CPU workers, whose C heap keeps freed blocks, were 20 to 37%
larger than their plan (measured: docs/performance.md), and the driver takes 0.3 GiB."""


def shares_cores(cluster: Cluster) -> bool:
    """Whether workers may share the cores of this machine. A declared cluster has no more devices than declared."""
    return cluster.kind == "cpu" and cluster.device is None and not cluster.nodes


def within_memory(machine: Machine, work: Experiment, cluster: Cluster, placement: Placement | None) -> Machine:
    """Returns the machine with what a plan may use of its memory."""
    machine = with_share_of_host(machine, work, cluster, placement)
    reserve = reserved_bytes(work, cluster, machine.memory_limit_bytes)
    return replace(machine, memory_limit_bytes=machine.memory_limit_bytes - reserve, reserve=reserve)


def with_share_of_host(
    machine: Machine, work: Experiment, cluster: Cluster, placement: Placement | None = None
) -> Machine:
    """Returns the machine with each worker's share of the memory of its host, and of the cores of this one. Devices
    that are declared or accelerators are not shared."""
    if cluster.kind == "gpu" or cluster.device is not None:
        return machine
    if shares_cores(cluster):
        workers = work.pipeline.stages * work.pipeline.replicas
        share = cluster.bytes_per_device * cluster.devices // workers
        return replace(machine, memory_limit_bytes=share, cores=cluster.devices)
    if placement is None:
        return machine
    used = Counter(placement.ids)
    share = min(cluster.bytes_per_device * node.total // used[node.id] for node in placement.nodes)
    return replace(machine, memory_limit_bytes=share)


def reserved_bytes(work: Measurable, cluster: Cluster, memory: int) -> int:
    """Returns the bytes of a device that a plan leaves free."""
    share = work.pipeline.memory_reserve
    return int((RESERVES[cluster.kind] if share is None else share) * memory)
