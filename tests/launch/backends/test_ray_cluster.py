"""A cluster of Ray whose nodes have different devices; without a Ray."""

from types import SimpleNamespace

import pytest

from experiments.base.cluster import Cluster
from launch.backends import ray_cluster
from launch.backends.ray_cluster import RayClusterBackend
from suite.errors import PlacementError
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.placement import Node

GPUS = {
    "a": Cluster(4, 79 * GIB, "gpu", name="H100"),
    "b": Cluster(4, 39 * GIB, "gpu", name="A100"),
    "c": Cluster(2, 38 * GIB, "gpu", name="A100", has_bf16=False),
    "d": Cluster(1, 22 * GIB, "gpu", name="L4"),
    "e": Cluster(8, 80 * GIB, "gpu", name="NVIDIA A100-SXM4-80GB"),
}


@pytest.fixture
def cancelled():
    """The calls that were cancelled."""
    return []


@pytest.fixture
def backend(monkeypatch, cancelled):
    """Returns a backend whose cluster has some of the GPUS."""

    def make(names):
        made = RayClusterBackend()
        nodes = [Node(name, f"node {name}", 0, GPUS[name].devices) for name in names]
        made._connection = SimpleNamespace(
            kind=lambda: "GPU", nodes=lambda kind: nodes, name=lambda: "c", left_out={}, nodes_=nodes
        )
        return made

    def collect(asked, limit_s):
        silent = {node: "no answer in 60 s" for node in asked if node.id == "silent"}
        return {node: GPUS[node.id] for node in asked if node not in silent}, silent

    monkeypatch.setattr(ray_cluster, "start_on", lambda node, *_, **__: f"call to {node}")
    monkeypatch.setattr(ray_cluster, "collect", collect)
    monkeypatch.setattr(ray_cluster, "cancel", cancelled.append)
    return make


def test_a_silent_node_is_left_out_and_named_and_a_cluster_of_silent_nodes_is_refused(backend, cancelled):
    own = backend("ab")
    own._connection.nodes_.append(Node("silent", "node s", 0, 4))
    cluster = own.cluster()
    assert (cluster.devices, [node.id for node in cluster.nodes]) == (8, ["a", "b"])
    assert cluster.notes[0] == "left out: node s, which gave no result: no answer in 60 s; run `gpipe doctor`"
    assert own._connection.left_out.keys() == {"silent"}
    own._connection.nodes_[:] = [Node("silent", "node s", 0, 4)]
    with pytest.raises(PlacementError, match="node node s gave no result: no answer in 60 s"):
        own.cluster()
    assert cancelled == ["call to silent"] * 2


def test_nodes_of_one_device_have_the_memory_of_the_smallest(backend):
    cluster = backend("bc").cluster()
    assert (str(cluster), cluster.notes) == ("6 GPUs with 38.0 GiB each on 2 nodes", ())
    assert not cluster.has_bf16


@pytest.mark.parametrize(
    ("nodes", "name", "gib"),
    [("ab", "A100", 39), ("cd", "A100", 22), ("ae", "NVIDIA A100-SXM4-80GB", 79)],
    ids=["less memory", "no bf16, and the memory of another", "a lower peak, and more memory"],
)
def test_different_devices_count_as_the_slower_with_the_smallest_memory_and_that_is_said(backend, nodes, name, gib):
    cluster = backend(nodes).cluster()
    others = ", ".join(GPUS[node].name for node in nodes)
    said = f"different devices ({others}): all count as {name}, with the lowest of their rates and memories"
    assert cluster.notes == (said,)
    assert (cluster.name, cluster.devices) == (name, sum(GPUS[node].devices for node in nodes))
    assert (cluster.bytes_per_device, cluster.has_bf16) == (gib * GIB, "c" not in nodes)
    assert [node.id for node in cluster.nodes] == [*nodes]


def test_layers_are_measured_on_the_devices_that_all_count_as(backend, monkeypatch):
    own = backend("abc")
    cluster = own.cluster()
    own._connection.nodes_[:] = [Node("a", "", 4, 4), Node("b", "", 1, 4), Node("c", "", 2, 2)]
    asked = []
    monkeypatch.setattr(ray_cluster, "run_on_all", lambda nodes, *_, **__: asked.extend(nodes) or {nodes[0]: "result"})
    assert own.on_free_devices(bool, cluster, 2, print) == "result"
    assert [node.id for node in asked] == ["c"]
