"""What the doctor's facts and measurements mean, and what it does where there is no cluster."""

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.backends.link_cache import file_of, read_links, write_links
from launch.diagnostics import clocks, cross_node_checks, link_benchmark, link_report, node_checks, node_facts
from launch.diagnostics import command as doctor
from launch.diagnostics.clocks import Skew, skew
from launch.diagnostics.node_checks import MIB
from launch.diagnostics.probes import LocalProbe, Node
from suite.errors import CheckpointError, PlacementError
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.simulate import Link
from tests.launch.command_line import call

PATIENCE_S = 40.0
FACTS = node_facts.NodeFacts(
    python="3.11.7",
    versions=dict.fromkeys(node_facts.PACKAGES, "1.0"),
    code="c0de",
    cores=8,
    memory=64 * GIB,
    gpus=(),
    usable=0,
    listing_error="",
    shared=node_facts.Folder("/dev/shm", 32 * GIB, 32 * GIB),
    folders=(node_facts.Folder("/runs", 100 * GIB, 50 * GIB), node_facts.Folder("/tmp/ray", 100 * GIB, 50 * GIB)),
)
H100 = node_facts.Gpu("H100", "570.1")
NODES = [Node(name, f"10.0.0.{at}", name, cpus=8, gpus=0) for at, name in enumerate("abc")]
GPU_NODES = [replace(node, gpus=2) for node in NODES]
GPU_FACTS = replace(FACTS, gpus=(H100, H100), usable=2)


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
    monkeypatch.setattr(node_checks, "_pinned", dict)
    assert unwell_of(node_checks.versions(known())) == []
    (one,) = unwell_of(node_checks.versions(known(**changed)))
    assert (one.level, one.subject, one.found) == (level, "versions", words)


def test_versions_other_than_the_pinned_are_a_warning_and_a_local_build_is_none():
    pinned = {name: version for name, version in node_facts.gather([]).versions.items() if version}
    assert node_checks._pinned().keys() >= {"torch", "ray", "deepspeed", "transformers", "datasets", "wandb"}
    assert unwell_of(node_checks.versions(known(NODES[:1], replace(FACTS, versions=pinned)))) == []
    (one,) = unwell_of(node_checks.versions(known(NODES[:1], replace(FACTS, versions={**pinned, "torch": "2.0.1"}))))
    assert (one.level, one.subject) == ("warning", "versions")
    assert "torch 2.0.1 everywhere, but the suite is tested with torch==" in one.found


@pytest.mark.parametrize(
    ("changed", "offered", "level", "words"),
    [
        ({"gpus": (H100,), "usable": 1}, 2, "fault", "c: Ray offers 2 GPUs, but there are 1"),
        ({}, 1, "warning", "c: there are 2 GPUs, but Ray offers 1"),
        ({"usable": 0}, 2, "fault", "c: nvidia-smi lists 2 GPUs, torch 1.0 can use 0"),
        (
            {"gpus": (), "usable": 0, "listing_error": "no driver"},
            2,
            "fault",
            "c: its GPUs cannot be listed: no driver",
        ),
        ({"gpus": (replace(H100, driver="525.0"),) * 2}, 2, "warning", "GPUs of different drivers: 570.1 on a and b"),
        ({"gpus": (replace(H100, name="A100"),) * 2}, 2, "warning", "GPUs of different names: H100 on a and b, A100"),
    ],
)
def test_gpus_that_are_missing_or_unlike(changed, offered, level, words):
    assert unwell_of(node_checks.devices(known(GPU_NODES, GPU_FACTS))) == []
    nodes = [*GPU_NODES[:2], replace(GPU_NODES[2], gpus=offered)]
    found = unwell_of(node_checks.devices(known(nodes, GPU_FACTS, **changed)))
    assert found[0].level == level
    assert any(one.found.startswith(words) for one in found), found


def test_nodes_that_offer_unequal_devices():
    nodes = [*NODES[:2], replace(NODES[2], cpus=4)]
    (one,) = unwell_of(node_checks.devices(known(nodes)))
    assert (one.level, one.found) == ("warning", "unequal cores: 8 on a and b, 4 on c")
    head = replace(NODES[2], cpus=0)  # a head without devices is as it should be
    assert unwell_of(node_checks.devices(known([*NODES[:2], head]))) == []
    assert [one.level for one in node_checks.devices(known([head]))] == ["fault"]


def shm(size, free=None):
    return {"shared": node_facts.Folder("/dev/shm", size, size if free is None else free)}


@pytest.mark.parametrize(
    ("nodes", "of", "changed", "level"),
    [
        (NODES, FACTS, shm(64 * MIB), "fault"),
        (NODES, FACTS, shm(32 * GIB, 10 * MIB), "fault"),
        (NODES, FACTS, shm(2 * GIB), "warning"),  # Ray would use the disk
        (GPU_NODES, GPU_FACTS, {**shm(512 * MIB), "gpus": (H100,) * 8}, "fault"),  # 56 pairs need 515 MiB
        (GPU_NODES, GPU_FACTS, {**shm(10 * GIB), "gpus": (H100,) * 8}, None),
    ],
)
def test_shared_memory(nodes, of, changed, level):
    found = unwell_of(node_checks.shared_memory(known(nodes, of, **changed)))
    assert [one.level for one in found] == ([] if level is None else [level])


@pytest.mark.parametrize(
    ("runs", "temporary", "level"),
    [(50, 50, None), (5, 50, "warning"), (0.5, 50, "fault"), (50, 4, "warning"), (50, 6, None), (50, 0.5, "fault")],
)
def test_disk(runs, temporary, level):
    free = {"/runs": runs, "/tmp/ray": temporary}
    folders = tuple(node_facts.Folder(path, 100 * GIB, int(gib * GIB)) for path, gib in free.items())
    found = unwell_of(node_checks.disk(known(folders=folders), "/tmp/ray"))
    assert [one.level for one in found] == ([] if level is None else [level])


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=9))
def test_a_skew_lies_within_its_bound(offset, trips):
    """Whatever the way there and the way back take, each time anew."""
    now = [1e9]
    waits = iter(trips)

    def read():
        there, back = next(waits)
        now[0] += there
        at = now[0] + offset
        now[0] += back
        return at

    time = SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0])
    with patch.multiple(clocks, time=time, ROUNDS=len(trips)):
        found = skew(read)
    assert abs(found.offset_s - offset) <= found.bound_s + 1e-5
    assert found.bound_s <= min(map(sum, trips)) / 2 + 1e-5


def test_a_skew_within_its_bound_is_none():
    assert Skew(3.0, 3.5).least_s == 0
    assert Skew(-3.0, 0.5).least_s == 2.5


def measured(**rates):
    return link_benchmark.LinkMeasurements({tuple(names): Link(1e-4, rate) for names, rate in rates.items()}, None)


def test_links_that_are_slow_or_unlike_the_others():
    assert unwell_of(link_report.findings_of(measured(ab=1e9, ac=0.9e9, bc=1.1e9, aa=5e9), None)) == []
    (one,) = unwell_of(link_report.findings_of(measured(ab=1e9, ac=0.9e9, bc=0.3e9), None))
    assert one.found.startswith("b - c: 0.1 ms, 300 MB/s")
    (one,) = unwell_of(link_report.findings_of(measured(ab=0.05e9), None))
    assert one.found.startswith("a - b: 0.1 ms, 50 MB/s")
    late = link_benchmark.LinkMeasurements({("a", "b"): Link(0.03, 1e9)}, None)
    (one,) = unwell_of(link_report.findings_of(late, None))
    assert one.found.startswith("a - b: 30 ms")


def test_workers_of_ray_that_are_slower_than_plain_processes():
    alone = measured(aa=4e9)
    assert unwell_of(link_report.findings_of(measured(aa=3e9), alone)) == []
    (one,) = unwell_of(link_report.findings_of(measured(aa=1e9), alone))
    assert one.found == "Ray workers on a get 1,000 MB/s, plain processes there 4,000 MB/s"


def test_what_is_kept_is_the_slowest_link_between_nodes_and_the_all_reduce(tmp_path):
    found = replace(measured(ab=2e9, bc=1e9, aa=5e9, bb=4e9), reduced=Link(1e-3, 7e8))
    links = link_report.to_link_speeds(found, "head:6379")
    write_links(tmp_path / "cache", links)
    assert read_links(tmp_path / "cache", "head:6379") == links
    assert read_links(tmp_path / "cache", "other:6379") is None
    assert (links.between_nodes.bytes_per_s, links.all_reduce) == (1e9, Link(1e-3, 7e8))
    assert link_report.to_link_speeds(measured(aa=5e9), "a:1").between_nodes is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cluster": "a", "between_nodes": {"seconds": 1}}'])
def test_links_that_are_not_whole_are_none(tmp_path, text):
    assert read_links(tmp_path, "a:1") is None
    (tmp_path / file_of("a:1")).write_text(text)
    assert read_links(tmp_path, "a:1") is None


def test_every_pair_of_few_nodes_and_a_ring_of_many():
    few = [node for node in NODES for _ in range(2)]
    task = link_benchmark.plan(few)
    assert sorted(task.pairs.values()) == [("a", "a"), ("a", "b"), ("a", "c"), ("b", "b"), ("b", "c"), ("c", "c")]
    assert task.reduced == (0, 2, 4)
    many = [Node(f"n{at}", "", f"n{at}") for at in range(20)]
    task = link_benchmark.plan(many)
    assert len(task.pairs) == 20
    assert {name for pair in task.pairs.values() for name in pair} == {node.name for node in many}


def test_this_machine_alone_without_ray(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    findings, linked = doctor.examine(LocalProbe(), str(tmp_path), PATIENCE_S)
    subjects = [one.subject for one in findings]
    assert subjects[0] == "versions"
    assert {"devices", "shared memory", "disk", "storage", "wandb"} <= set(subjects)
    assert linked
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


@pytest.mark.parametrize(
    ("address", "storage", "kind", "words"),
    [
        ("head", "", PlacementError, "--address head is not the address of a Ray cluster: use host:port"),
        ("", "s4://bucket/runs", CheckpointError, "s4://bucket/runs"),
    ],
)
def test_what_was_asked_wrongly_is_told_before_anything_is_done(address, storage, kind, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=words):
        doctor.doctor(address, storage, Console())
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "runs"])


def test_an_address_that_does_not_answer_is_one_sentence_and_exit_code_2(tmp_path):
    code, out, errors = call("doctor", "--address", "127.0.0.1:9", folder=tmp_path)
    assert code == 2, out + errors
    assert "error: no Ray cluster answers at 127.0.0.1:9" in errors
    assert "Traceback" not in errors


class TwoNodes:
    """Probes of two addresses of this machine, called in this process."""

    temporary = ""

    def __init__(self):
        self.nodes = [Node("a", "127.0.0.1"), Node("b", "127.0.0.2")]

    def ask(self, nodes, function, arguments, seconds):
        return {node: function(*arguments(node)) for node in nodes}, {}


def test_two_nodes_reach_each_other_and_their_clocks_agree():
    probes = TwoNodes()
    (finding,), connected = cross_node_checks.ports(probes, probes.nodes)
    assert (finding.level, connected) == ("ok", True)
    assert finding.found.startswith("2 nodes, 2 directions, all open")
    (finding,) = cross_node_checks.clocks(probes, probes.nodes)
    assert finding.level == "ok"


def test_the_doctor_imports_ray_on_use_alone():
    """Ray reads its variables, such as RAY_AUTH_MODE, when it is imported."""
    code = "import sys, launch.diagnostics.command, launch.ray_nodes; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
