"""The links of a plan by their place: NVLink or PCIe inside a node, the network between nodes."""

from __future__ import annotations

from dataclasses import replace

from experiments.base.cluster import Cluster
from experiments.base.hints import command
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.placement import Placement
from suite.pipeline.planning.simulate import Link, Links


def across_nodes(machine: Machine, placement: Placement, cluster: Cluster) -> Machine:
    """Returns the machine with the link of each pair of neighbouring stages, and the rate of the all-reduce over
    replicas: the slower of the two kinds where replicas span nodes. An unmeasured network counts like the links inside
    a node."""
    network = cluster.between
    if network is None:
        return machine
    assert isinstance(machine.link, Link)
    link = Links(machine.link, network, placement.cuts) if placement.cuts else machine.link
    reduce = machine.reduce_bytes_per_s
    if placement.spread:
        reduce = min(reduce, (cluster.reduction or network).bytes_per_s)
    return replace(machine, link=link, reduce_bytes_per_s=reduce)


def network_notes(placement: Placement, cluster: Cluster) -> tuple[str, ...]:
    """Returns a note on the links of a plan that uses the network."""
    if not (placement.cuts or placement.spread):
        return ()
    if cluster.device is not None and cluster.between is not None:
        inside, outside = cluster.device, cluster.between
        return (
            f"links, declared: {inside.link_name} inside a node, {inside.link / 1e9:.0f} GB/s each way; the network "
            f"between nodes, {8 * outside.bytes_per_s / 1e9:.0f} Gbit/s a device",
        )
    if cluster.network is None:
        return (
            f"the network between nodes is not measured (run {command('doctor')}): "
            "assumed to be like the links inside a node",
        )
    latency, rate = cluster.network.latency_s * 1e3, cluster.network.bytes_per_s / 1e6
    return (f"the network between nodes, measured by {command('doctor')}: {latency:.2f} ms, {rate:,.0f} MB/s",)
