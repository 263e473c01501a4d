"""A cluster of Ray with several kinds of devices; without a Ray."""

from math import inf
from types import SimpleNamespace

import pytest

from experiments.base.cluster import Cluster
from launch.backends import ray_cluster
from launch.backends.ray_cluster import RayClusterBackend
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.placement import Node

GPUS = {
    "a": Cluster(4, 79 * GIB, "gpu", name="H100"),
    "b": Cluster(4, 39 * GIB, "gpu", name="A100"),
    "c": Cluster(2, 38 * GIB, "gpu", name="A100", has_bf16=False),
    "d": Cluster(1, 22 * GIB, "gpu", name="L4"),
    "e": Cluster(1, 15 * GIB, "gpu", name="V100"),
}


@pytest.fixture
def backend(monkeypatch):
    """Returns a backend whose cluster has some of the GPUS."""

    def make(names):
        made = RayClusterBackend()
        nodes = [Node(name, f"node {name}", 0, GPUS[name].devices) for name in names]
        made._connection = SimpleNamespace(
            kind=lambda: "GPU", nodes=lambda kind: nodes, name=lambda: "c", nodes_=nodes, device_names={}
        )
        return made

    found = {name: (devices, inf) for name, devices in GPUS.items()}
    monkeypatch.setattr(ray_cluster, "run_on_all", lambda nodes, *_, **__: {node: found[node.id] for node in nodes})
    return make


def test_nodes_of_one_kind_have_the_memory_of_the_smallest(backend):
    cluster = backend("bc").cluster()
    assert (str(cluster), cluster.parts) == ("6 GPUs with 38.0 GiB each on 2 nodes", ())
    assert not cluster.has_bf16


def test_each_kind_of_device_is_a_part_and_nodes_are_known_by_theirs(backend):
    own = backend("bac")
    cluster = own.cluster()
    assert str(cluster) == "6 A100 with 38.0 GiB each on 2 nodes and 4 H100 with 79.0 GiB each"
    assert (cluster.devices, cluster.label, cluster.has_bf16) == (10, "H100", False)
    assert [(node.id, node.device, node.free) for node in cluster.nodes] == [
        ("b", "A100", 4), ("c", "A100", 2), ("a", "H100", 4),
    ]  # fmt: skip
    assert own._connection.device_names == {"a": "H100", "b": "A100", "c": "A100"}
    assert cluster.notes == ()


def test_more_kinds_than_a_plan_takes_count_as_the_smallest_and_that_is_said(backend):
    cluster = backend("abcde").cluster()
    assert (str(cluster), cluster.parts) == ("12 GPUs with 15.0 GiB each on 5 nodes", ())
    assert cluster.notes == ("the nodes have 4 kinds of devices, plans take 3: all count as V100",)


def test_cores_that_share_a_quota_are_another_kind_than_whole_ones(backend, monkeypatch):
    cores, quotas = Cluster(4, 4 * GIB, "cpu", name="EPYC"), {"a": inf, "b": 4.0, "c": 1.0}
    monkeypatch.setattr(
        ray_cluster, "run_on_all", lambda nodes, *_, **__: {node: (cores, quotas[node.id]) for node in nodes}
    )
    parts = backend("abc").cluster().parts
    assert [(part.label, part.devices) for part in parts] == [("EPYC", 8), ("EPYC, 50% of a core", 2)]


def test_a_kind_is_measured_on_its_own_nodes(backend, monkeypatch):
    own = backend("abc")
    (part,) = [part for part in own.cluster().parts if part.label == "A100"]
    own._connection.nodes_[:] = [Node("a", "", 4, 4), Node("b", "", 1, 4), Node("c", "", 2, 2)]
    asked = []
    monkeypatch.setattr(ray_cluster, "run_on_all", lambda nodes, *_, **__: asked.extend(nodes) or {nodes[0]: "result"})
    assert own.on_free_devices(bool, part, 2, print) == "result"
    assert [node.id for node in asked] == ["c"]
