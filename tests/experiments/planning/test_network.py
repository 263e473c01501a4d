"""Every pair of neighbouring stages has the link of its place, and the all-reduce over replicas the slower kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.base.cluster import NETWORK, parse_cluster
from experiments.planning.problem import across_nodes, estimated_costs, network_notes
from experiments.planning.request import plan_request
from suite.pipeline.planning.devices import DEVICES, GIB, Machine
from suite.pipeline.planning.placement import Node
from suite.pipeline.planning.simulate import Link, Links
from tests.experiments.planning.works import LAPTOP, linear


@given(
    name=st.sampled_from(["P100", "V100", "A100", "H100", "H200"]), nodes=st.integers(2, 6), each=st.integers(1, 8),
    latency_s=st.sampled_from([0.0, 1.0]), data=st.data(),
)  # fmt: skip
def test_neighbours_of_one_node_use_its_link_and_others_the_network(
    name: str, nodes: int, each: int, latency_s: float, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, nodes * each))
    replicas = data.draw(st.integers(1, nodes * each // stages))
    cluster, inside = parse_cluster(f"{nodes}x{each}x{name}", LAPTOP), DEVICES[name].messages
    placement = cluster.place(stages, replicas)
    assert placement is not None
    machine = across_nodes(Machine(GIB, 0, inside, DEVICES[name].link, reduce_latency_s=latency_s), placement, cluster)
    ids = placement.ids
    for stage in range(stages - 1):
        # replicas step together: if one pair is in two nodes, all wait for the network
        same = all(ids[at] == ids[at + 1] for at in range(stage, len(ids), stages))
        link = machine.link.between(stage, stage + 1) if isinstance(machine.link, Links) else machine.link
        assert link == (inside if same else NETWORK)
    together = all(len(set(ids[stage::stages])) == 1 for stage in range(stages))
    slower = min(DEVICES[name].link, NETWORK.bytes_per_s)
    assert machine.reduce_bytes_per_s == (DEVICES[name].link if together else slower)
    assert machine.reduce_latency_s == (latency_s if together else max(latency_s, NETWORK.latency_s))


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ("2x2xH100", "NVLink 4 inside a node, 450 GB/s each way; the network between nodes, 200 Gbit/s a device"),
        ("2x2xP100", "PCIe 3 inside a node, 6 GB/s each way; the network between nodes, 200 Gbit/s a device"),
        ("4xH100", ""),
    ],
)
def test_a_plan_that_uses_the_network_names_its_links_and_no_other_does(cluster: str, told: str) -> None:
    lines = plan_request(linear("pipeline.stages=4"), parse_cluster(cluster, LAPTOP), estimated_costs).lines()
    assert [line for line in lines if "links, declared" in line] == ([f"  links, declared: {told}"] if told else [])


@pytest.mark.parametrize(
    ("kind", "link", "told"),
    [
        ("gpu", NETWORK, "assumed to be 200 Gbit/s a device"),
        ("cpu", None, "assumed to be like the links inside a node"),
    ],
)
def test_a_network_that_is_not_measured_is_a_common_one_between_gpus(
    kind: Literal["cpu", "gpu"], link: Link | None, told: str
) -> None:
    nodes = (Node("1", "a", 1, 1), Node("2", "b", 1, 1))
    cluster = replace(LAPTOP, devices=2, kind=kind, nodes=nodes)
    placement = cluster.place(2, 1)
    assert placement is not None
    machine = across_nodes(Machine(GIB, 0, Link(), 1e9), placement, cluster)
    assert machine.link == (Link() if link is None else Links(Link(), link, placement.cuts))
    assert told in network_notes(placement, cluster)[0]
