"""Clusters as users write them, and the links between their devices."""

from __future__ import annotations

import random
import re

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
        ("2x8xH100", 16, 79 * GIB, 2),
        ("H200", 1, 139 * GIB, 1),
        ("4xA100:40GiB", 4, 40 * GIB, 1),
        ("2x8xRTX 4090", 16, int(23.5 * GIB), 2),
        ("8xTPUv3", 8, 16 * GIB, 1),
        ("3x16GB", 3, 16 * 10**9, 1),
        ("1.5GiB", 1, 3 * GIB // 2, 1),
        ("4 x 2 x 12 GiB", 8, 12 * GIB, 4),
        # case and spaces are ignored
        (" 2 X 8x h100 ", 16, 79 * GIB, 2),
        ("8xtpuV3", 8, 16 * GIB, 1),
        ("16x16gib", 16, 16 * GIB, 1),
    ],
)
def test_a_cluster_is_devices_with_memory_on_nodes(text: str, devices: int, memory: int, nodes: int) -> None:
    parsed = parse_cluster(text, THIS)
    assert (parsed.devices, parsed.bytes_per_device, max(1, len(parsed.nodes)), parsed.kind) == (
        devices, memory, nodes, "gpu",
    )  # fmt: skip
    assert parsed.device is not None
    assert parsed.device.memory_bytes == memory


def test_different_devices_count_as_the_slowest_with_the_smallest_memory() -> None:
    parsed, slow = parse_cluster("8xH200 + 2x4xA100-40GB", THIS), parse_cluster("2x8xA100-40GB", THIS)
    assert str(parsed) == "16 devices that count as A100-40GB with 39.4 GiB each on 3 nodes"
    assert (parsed.device, parsed.bytes_per_device, parsed.kind) == (slow.device, slow.bytes_per_device, slow.kind)
    assert [(node.id, node.name, node.free, node.total) for node in parsed.nodes] == [
        ("0", "node 0", 8, 8), ("1", "node 1", 4, 4), ("2", "node 2", 4, 4),
    ]  # fmt: skip
    assert parsed.notes == (
        "different devices (H200, A100-40GB): all count as A100-40GB, with the lowest of their rates and memories",
    )


def test_each_rate_is_the_lowest_and_the_link_the_slowest() -> None:
    """In bf16 an A10 is slower than an A100, in fp32 faster; an MI250X has the slower memory."""
    parsed = parse_cluster("8xA100+4xA10:60GiB+MI250X:20GiB", THIS)
    device = parsed.device
    assert device is not None
    assert (device.name, device.memory_bytes, parsed.bytes_per_device) == ("A10:60GiB", 20 * GIB, 20 * GIB)
    assert (device.fp32, device.bf16, device.bandwidth) == (19.5e12, 125e12, 600e9)
    assert (device.link, device.link_name) == (12e9, "PCIe 4")


def test_equal_devices_in_two_parts_are_not_different() -> None:
    parsed = parse_cluster("8xH100+4xH100", THIS)
    assert (parsed.notes, parsed.devices, [node.total for node in parsed.nodes]) == ((), 12, [8, 4])


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
        ("x", "no device is called 'x'"),
        ("0x16GiB", "no device is called '0x16GiB'"),
        ("2x8x4xH100", "no device is called '4xH100'"),
        ("3x", "has no device"),
        ("16x16", "no device is called '16'"),
        ("16x0GiB", "no device is called '0GiB'"),
        ("16GiB,16GiB", "no device is called"),
        ("8xH100+8xFOO+2xA100", "no device is called 'FOO'"),
        ("8xH100+", "it has no device"),
    ],
)
def test_an_invalid_cluster_is_one_sentence_with_the_format(text: str, part: str) -> None:
    with pytest.raises(SettingError) as fault:
        parse_cluster(text, THIS)
    assert part in str(fault.value)
    is_the_sentence(str(fault.value), text)


def test_devices_that_make_no_cluster_together_are_refused() -> None:
    for text, fault in (("8xH100+2xthis", "this machine beside other"), ("8xH100+8xTPUv3", "mixes GPUs and other")):
        with pytest.raises(SettingError, match=f"--cluster '{re.escape(text)}' .*{fault} devices"):
            parse_cluster(text, THIS)


def is_the_sentence(message: str, text: str) -> None:
    """Checks that an error says what was given, what is known and how to write it, on one line."""
    assert message.startswith(f"--cluster {text!r} is not a cluster: ")
    assert "devices are TPUv2, TPUv3, P100, " in message
    assert message.endswith(
        "write [nodes x] devices x device, such as 16x16GiB, 2x8xH100 or 4xA100-40GB, and + between different devices"
    )
    assert "\n" not in message


PIECES = (
    *["x", "X", " ", "\n", "-", ":", "_", "0", "9" * 400, "1e9", "GiB", "GB", "TB", "A100", "\0", "\u0661", "\ud800"],
)
VALID = ("16x16GiB", "2x8xH100", "4 x 2 x 12 GiB", "4xA100-40GB", "A100:40GiB", "4xRTX 4090", "2x8xMI300X", "1.5GB")


@pytest.mark.parametrize("seed", range(40))
def test_a_mutated_cluster_works_or_is_refused_in_the_sentence(seed: int) -> None:
    dice = random.Random(seed)
    text = dice.choice(VALID)
    for _ in range(dice.randint(1, 3)):
        at = dice.randint(0, len(text))
        text = text[:at] + dice.choice((*PIECES, "", "")) + text[at + dice.randint(0, 2) :]
    try:
        parsed = parse_cluster(text, THIS)
    except SettingError as fault:
        is_the_sentence(str(fault), text)
    else:
        assert parsed.devices > 0
        assert parsed.bytes_per_device > 0


def test_a_size_alone_is_said_to_have_the_speed_of_the_papers_core() -> None:
    (note,) = parse_cluster("4x40GiB", THIS).notes
    assert note == "only a size is declared: times are those of TPUv3 cores; A100:40GiB has an A100's"
    assert parse_cluster("A100:40GiB", THIS).notes == parse_cluster("8xTPUv3", THIS).notes == THIS.notes == ()


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
    assert str(parse_cluster("2x8xH100", THIS)) == "16 H100 with 79.0 GiB each on 2 nodes"
