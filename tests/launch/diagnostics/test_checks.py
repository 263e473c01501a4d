"""What the doctor's facts and measurements mean, and what it does where there is no cluster."""

import threading
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from launch.backends.link_cache import LinkSpeeds
from launch.diagnostics import checks, links
from launch.diagnostics import command as doctor
from launch.diagnostics.checks import MIB
from launch.diagnostics.probes import Host, LocalProbe
from launch.node_probe import pinned_versions
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.simulate import Link

PATIENCE_S = 40.0
FACTS = checks.NodeFacts(
    python="3.11.7",
    versions=dict.fromkeys(checks.PACKAGES, "1.0"),
    code="c0de",
    cores=8,
    gpus=0,
    usable=0,
    listing_error="",
    shared=32 * GIB,
    shared_free=32 * GIB,
    open_files=65536,
)
NODES = [Host(name, f"10.0.0.{at}", name, cpus=8, gpus=0) for at, name in enumerate("abc")]
GPU_NODES = [replace(node, gpus=2) for node in NODES]
GPU_FACTS = replace(FACTS, gpus=2, usable=2)


def known(nodes=NODES, facts=FACTS, **changed):
    """Facts of three nodes; those of the last with what is changed."""
    return {node: replace(facts, **(changed if node == nodes[-1] else {})) for node in nodes}


def unwell_of(findings):
    return [one for one in findings if one.level != "ok"]


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"python": "3.12.1"}, "fault", "Python differs: 3.11.7 on a and b, 3.12.1 on c"),
        ({"code": "0ther"}, "fault", "the suite's code differs: c0de on a and b, 0ther on c"),
        ({"versions": {**FACTS.versions, "wandb": None}}, "fault", "wandb is not installed on c"),
    ],
)
def test_versions_that_differ(changed, level, words, monkeypatch):
    monkeypatch.setattr("launch.node_probe.pinned_versions", dict)
    assert unwell_of(checks.versions(known())) == []
    (one,) = unwell_of(checks.versions(known(**changed)))
    assert (one.level, one.subject, one.found) == (level, "versions", words)


def test_versions_other_than_the_pinned_are_a_warning_and_a_local_build_is_none():
    installed = {name: version for name, version in checks.gather().versions.items() if version}
    assert pinned_versions().keys() >= {"torch", "ray", "deepspeed", "transformers", "datasets", "wandb"}
    assert "pytest" not in pinned_versions()
    assert unwell_of(checks.versions(known(NODES[:1], replace(FACTS, versions=installed)))) == []
    (one,) = unwell_of(checks.versions(known(NODES[:1], replace(FACTS, versions={**installed, "torch": "2.0.1"}))))
    assert (one.level, one.subject) == ("warning", "versions")
    assert "torch 2.0.1 everywhere, but the suite is tested with torch==" in one.found
    assert "pip install 'torch==" in one.remedy


@pytest.mark.parametrize(
    ("changed", "offered", "level", "words"),
    [
        ({"gpus": 1, "usable": 1}, 2, "fault", "c: Ray offers 2 GPUs, but there are 1"),
        ({}, 1, "warning", "c: there are 2 GPUs, but Ray offers 1"),
        ({"usable": 0}, 2, "fault", "c: nvidia-smi lists 2 GPUs, torch 1.0 can use 0"),
        ({"gpus": 0, "usable": 0, "listing_error": "no driver"}, 2, "fault", "c: its GPUs cannot be listed: no driver"),
    ],
)
def test_gpus_that_are_missing(changed, offered, level, words):
    assert unwell_of(checks.devices(known(GPU_NODES, GPU_FACTS))) == []
    nodes = [*GPU_NODES[:2], replace(GPU_NODES[2], gpus=offered)]
    found = unwell_of(checks.devices(known(nodes, GPU_FACTS, **changed)))
    assert found[0].level == level
    assert any(one.found.startswith(words) for one in found), found


def test_devices_that_nodes_offer():
    assert [one.level for one in checks.devices(known())] == ["ok"]
    head = replace(NODES[2], cpus=0)  # a head without devices is as it should be
    (one,) = checks.devices(known([*NODES[:2], head]))
    assert (one.level, one.found) == ("ok", "16 cores on 2 nodes")
    (one,) = checks.devices(known([head]))
    assert (one.level, one.found) == ("fault", "no node offers a core")
    (one,) = unwell_of(checks.devices(known(cores=4)))
    assert (one.level, one.found) == ("warning", "c: Ray offers 8 CPUs, but its processes may use 4 cores")


@pytest.mark.parametrize(
    ("nodes", "of", "changed", "level"),
    [
        (NODES, FACTS, {"shared": 64 * MIB}, "fault"),
        (NODES, FACTS, {"shared_free": 10 * MIB}, "fault"),
        (NODES, FACTS, {"shared": 2 * GIB}, None),
        (GPU_NODES, GPU_FACTS, {"shared": 512 * MIB, "gpus": 8}, "fault"),  # 56 pairs need 515 MiB
        (GPU_NODES, GPU_FACTS, {"shared": 10 * GIB, "gpus": 8}, None),
        (NODES, FACTS, {"open_files": 1024}, "warning"),
        (NODES, FACTS, {"open_files": 4096}, None),
    ],
)
def test_shared_memory_and_open_files(nodes, of, changed, level):
    found = unwell_of(checks.limits(known(nodes, of, **changed)))
    assert [one.level for one in found] == ([] if level is None else [level])
    assert all(one.found.startswith("c: ") and one.remedy for one in found)


def test_links_that_are_slow():
    fast = {("a", "b"): [("a - b", Link(1e-4, 1e9))], ("a", "c"): [("a - c", Link(1e-4, 0.3e9))]}
    (one,) = links.findings_of(fast)
    assert (one.level, one.found) == ("ok", "2 measured, the slowest a - c: 0.1 ms, 300 MB/s")
    (one,) = links.findings_of({**fast, ("b", "c"): [("b - c", Link(1e-4, 0.05e9))]})
    assert one.level == "warning"
    assert one.found.startswith("b - c: 0.1 ms, 50 MB/s; less than a gigabit port's")


def test_gpus_of_a_node_are_named_and_judged_by_what_they_have_together():
    a, b = ([(node, number) for number in range(2)] for node in NODES[:2])
    gpus = {worker: str(worker[1]) for worker in (*a, *b)}

    def measured(slow, fast):
        of_gpu = [links.LinkMeasurements({(0, 1): Link(1e-4, rate)}, Link(1e-3, rate), "IB") for rate in (slow, fast)]
        answers = dict(zip((*a, *b), (*of_gpu, *(replace(one, pairs={}) for one in of_gpu)), strict=True))
        return links._summary("head:6379", [a, b], gpus, answers)

    speeds, found = measured(0.06e9, 0.07e9)  # a gigabit port that two GPUs share
    assert speeds == LinkSpeeds("head:6379", Link(1e-4, 0.06e9), Link(1e-3, 0.06e9))
    assert [(one.level, one.found) for one in found] == [
        ("ok", "2 measured, the slowest a GPU 0 - b GPU 0: 0.1 ms, 60 MB/s"),
        ("ok", "over 2 nodes, 2 GPUs of each at once: 1 ms, 60 MB/s"),
        ("ok", "NCCL uses IB"),
    ]
    (slow, *_) = measured(0.03e9, 0.04e9)[1]
    assert (slow.level, slow.found[:24]) == ("warning", "a - b: 0.1 ms, 70 MB/s; ")


def test_as_many_workers_on_each_node_in_the_order_of_their_gpus():
    a, b, c = NODES
    ready = {(a, 0): ("1", 5), (a, 1): ("0", 9), (a, 2): ("2", 7), (b, 0): ("0", 5), (b, 2): ("1", 5)}
    late = {(b, 1): "no answer in 60 s", (c, 0): "the actor died"}
    placed, found = links._placed(ready, late, [*ready, *late])
    assert placed == [[(a, 1), (a, 0)], [(b, 0), (b, 2)]]
    assert [(one.level, one.found) for one in found] == [
        ("warning", f"{b.name}: 1 of 3 workers are not ready: no answer in 60 s"),
        ("fault", f"{c.name}: 1 of 1 workers are not ready: the actor died"),
    ]


def test_a_cluster_with_one_node_that_has_devices_has_no_links():
    assert links.measure_links([NODES[0], replace(NODES[1], cpus=0)], "head:6379", print) == (None, [])


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 9, 20, 128])
def test_every_pair_of_few_nodes_and_a_ring_of_many_in_rounds_of_pairs_without_a_common_node(world):
    rounds = links.rounds_of(world)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len({*ranks})
    measured = [pair for pairs in rounds for pair in pairs]
    if world <= 8:
        assert sorted(measured) == [*combinations(range(world), 2)]
        assert len(rounds) == 2 ** (world - 1).bit_length() - 1
    else:
        assert sorted(measured) == sorted([*pairwise(range(world)), (0, world - 1)])
        assert len(rounds) == 2 + world % 2


def test_which_network_nccl_uses():
    log = "n1:9:9 [0] NCCL INFO NET/IB : No device found.\nn1:9:9 [0] NCCL INFO Using network Socket\n"
    libfabric = "n1:9:9 [0] NCCL INFO Using network AWS Libfabric\n"
    assert [*map(links.network_of, (log, libfabric, ""))] == ["Socket", "AWS Libfabric", ""]
    assert links.networks({"a": "", "b": ""}) == []
    assert [(one.level, one.found) for one in links.networks({"a": "IB", "b": "IB"})] == [("ok", "NCCL uses IB")]
    (one,) = links.networks({"a": "IB", "b": "Socket"})
    assert (one.level, one.found) == ("warning", "NCCL uses sockets on b")


def test_this_machine_alone_without_ray(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    findings, answered = doctor.examine(LocalProbe(), str(tmp_path), PATIENCE_S)
    subjects = {one.subject for one in findings}
    assert subjects >= {"versions", "devices", "storage"}
    assert "nodes" not in subjects
    assert [node.id for node in answered] == [""]  # it has no links to measure
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_is_not_there_is_a_fault_of_this_machine(tmp_path):
    findings, _ = doctor.examine(LocalProbe(), str(tmp_path / "none"), PATIENCE_S)
    assert any(one.subject == "storage" and "there is no such folder" in one.found for one in findings)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_does_not_answer_is_told_in_time():
    here = LocalProbe()
    answered = threading.Event()
    answers, silent = here.ask(here.nodes, answered.wait, lambda node: (), 0.2)
    answered.set()
    assert (answers, list(silent.values())) == ({}, ["no answer in 0.2 s"])
