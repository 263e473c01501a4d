"""Clusters as users write them, and the links between their devices."""

from __future__ import annotations

import pytest

from experiments.base.cluster import NETWORK, Cluster, parse_cluster
from suite.errors import SettingError
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.placement import Node
from suite.pipeline.planning.simulate import Link

THIS = Cluster(4, 3 * GIB, "cpu")


@pytest.mark.parametrize(
    ("text", "devices", "memory", "nodes"),
    [
        ("16x16GiB", 16, 16 * GIB, 1),
        ("128x16GiB", 128, 16 * GIB, 1),
        ("2x8xH100", 16, 79 * GIB, 2),
        ("2xH100", 2, 79 * GIB, 1),
        ("H200", 1, 139 * GIB, 1),
        ("8xTPUv3", 8, 16 * GIB, 1),
        ("3x16GB", 3, 16 * 10**9, 1),
        ("1.5GiB", 1, 3 * GIB // 2, 1),
        ("4 x 2 x 12 GiB", 8, 12 * GIB, 4),
    ],
)
def test_a_cluster_is_devices_with_memory_on_nodes(text: str, devices: int, memory: int, nodes: int) -> None:
    parsed = parse_cluster(text, THIS)
    assert (parsed.devices, parsed.bytes_per_device, max(1, len(parsed.nodes)), parsed.kind) == (
        devices, memory, nodes, "gpu",
    )  # fmt: skip
    assert parsed.device is not None
    assert parsed.device.memory_bytes == memory


@pytest.mark.parametrize(
    ("one", "other"),
    [("2X8xh100", "2x8xH100"), (" 2 x 8x H100 ", "2x8xH100"), ("8xtpuV3", "8xTPUv3"), ("16x16gib", "16x16GiB")],
)
def test_case_and_spaces_are_ignored(one: str, other: str) -> None:
    parsed, expected = parse_cluster(one, THIS), parse_cluster(other, THIS)
    assert (parsed.devices, parsed.nodes, parsed.bytes_per_device) == (
        expected.devices, expected.nodes, expected.bytes_per_device,
    )  # fmt: skip
    assert parsed.between == expected.between


def test_this_has_the_size_and_kind_of_the_machines_devices() -> None:
    parsed = parse_cluster("8xthis", THIS)
    assert (parsed.devices, parsed.bytes_per_device, parsed.kind, parsed.nodes) == (8, 3 * GIB, "cpu", ())
    assert parsed.device is not None
    assert parsed.device.fp32 > 0
    assert parse_cluster("THIS", Cluster(1, 79 * GIB, "gpu")).kind == "gpu"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no device"),
        ("  ", "has no device"),
        ("x", "is not a cluster"),
        ("0x16GiB", "is not a cluster"),
        ("-1xH100", "is not a cluster"),
        ("1.5xH100", "is not a cluster"),
        ("axH100", "is not a cluster"),
        ("2x8x4xH100", "is not a cluster"),
        ("3x", "has no device"),
        ("16x16", "no device is called '16'"),
        ("16x0GiB", "no device is called '0GiB'"),
        ("8xH10", "did you mean"),
        ("16GiB,16GiB", "no device is called"),
    ],
)
def test_an_invalid_cluster_is_one_sentence_with_the_format(text: str, part: str) -> None:
    with pytest.raises(SettingError) as fault:
        parse_cluster(text, THIS)
    message = str(fault.value)
    assert message.startswith(f"CLUSTER={text!r}")
    assert part in message
    assert "write [nodes x] devices x device, such as 16x16GiB, 2x8xH100" in message
    assert "\n" not in message


@pytest.mark.parametrize("example", ["16x16GiB", "2x8xH100", "8xTPUv3"])
def test_the_examples_of_that_sentence_are_valid(example: str) -> None:
    with pytest.raises(SettingError, match=example):
        parse_cluster("nonsense", THIS)
    assert parse_cluster(example, THIS).devices >= 8


def test_stages_of_one_node_stay_there_and_more_stages_go_over_the_network() -> None:
    pair = parse_cluster("2x8xH100", THIS)
    cuts = {stages: pair.place(stages, 16 // stages) for stages in (1, 4, 5, 8, 9, 16)}
    assert {stages: sorted(parsed.cuts) for stages, parsed in cuts.items() if parsed} == {
        1: [], 4: [], 5: [2], 8: [], 9: [7], 16: [7],
    }  # fmt: skip
    assert [parsed.spread for stages, parsed in cuts.items() if parsed] == [True, True, True, True, False, False]
    assert pair.between == NETWORK
    assert NETWORK.seconds(25 * 10**6) == pytest.approx(1e-3 + 20e-6)
    assert parse_cluster("16xH100", THIS).place(16, 1) is None


def test_available_nodes_use_the_measured_network() -> None:
    nodes = (Node("1", "a", 2, 2), Node("2", "b", 2, 2))
    assert Cluster(4, GIB, "cpu", nodes).between is None
    assert Cluster(4, GIB, "cpu", nodes, network=Link(1e-3, 1e8)).between == Link(1e-3, 1e8)


def test_a_cluster_prints_its_devices() -> None:
    assert str(THIS) == "4 CPU cores with 3.0 GiB each"
    assert str(Cluster(1, 79 * GIB, "gpu")) == "1 GPU with 79.0 GiB each"
    assert "16" in str(parse_cluster("2x8xH100", THIS))
    assert "H100" in str(parse_cluster("2x8xH100", THIS))
