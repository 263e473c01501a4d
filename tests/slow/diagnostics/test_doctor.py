"""The doctor finds what is wrong with a cluster: faults planted on hosts in namespaces of this machine, one test each.

All tests share one cluster. Each plants one fault, finds it and nothing else, and takes it away again.
"""

import json
import os
import resource
import secrets
import shutil
import subprocess
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from launch.backends.link_cache import read_links
from launch.backends.ray_init import join
from launch.diagnostics import command as doctor
from launch.diagnostics import links
from launch.diagnostics.probes import RayProbes
from launch.ray_nodes import start_on
from tests.launch.command_line import command, environment
from tests.slow.doctor_hosts import Hosts, during, missing

PATIENCE_S = 40.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        made = Hosts(tmp_path_factory.mktemp("hosts"))
        try:
            made.begin()
            yield made
        finally:
            made.end()


@pytest.fixture(scope="module")
def probes(hosts):
    import ray

    join(hosts.address, "")
    hosts.head.until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, 120)
    ray.shutdown()
    with closing(RayProbes(hosts.address)) as probes:
        yield probes


@pytest.fixture
def unwell(hosts, probes):
    """What is found, but for what is well."""

    def look(seconds=PATIENCE_S):
        return [one for one in doctor.examine(probes, str(hosts.storage), seconds)[0] if one.level != "ok"]

    return look


def test_hosts_in_order_have_no_fault(unwell):
    assert unwell() == []


def levels_and_checks(findings):
    return [(one.level, one.subject) for one in findings]


def another_version(hosts):
    about = hosts.extra / "transformers-4.0.dist-info"

    def install():
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0\n")

    return during(install, lambda: shutil.rmtree(about))


def few_open_files(hosts):
    usual = resource.prlimit(hosts.hosts[0].process.pid, resource.RLIMIT_NOFILE)

    def limit(files):
        for process in hosts.hosts[0].processes():
            with suppress(ProcessLookupError):
                resource.prlimit(process, resource.RLIMIT_NOFILE, (files, usual[1]))

    return during(lambda: limit(1024), lambda: limit(usual[0]))


def mounted(number, place, *what):
    return lambda hosts: hosts.hosts[number].mounted(place or hosts.storage, "-t", "tmpfs", "-o", *what, "none")


FAULTS = {
    "a version of its own": (another_version, "fault", "versions", "4.0 on {1}"),
    "one core": (
        lambda hosts: hosts.hosts[0].with_cores(sorted(os.sched_getaffinity(0))[:1]), "warning", "devices",
        "{0}: Ray offers 2 CPUs, but its processes may use 1 core",
    ),
    "a small shared memory": (mounted(1, "/dev/shm", "size=64m"), "fault", "shared memory", "{1}: /dev/shm has 64 MiB"),
    "few open files": (few_open_files, "warning", "open files", "{0}: a process may open 1024 files"),
    "no right to write": (mounted(0, "", "ro"), "fault", "storage", "{0} cannot write to {2}: Read-only file system"),
}  # fmt: skip
"""What is planted on a node, and the level, the check and the words of what is found."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_is_named_with_its_fault(hosts, unwell, fault):
    plant, *level_and_check, words = FAULTS[fault]
    with plant(hosts):
        (found,) = unwell()
    assert [found.level, found.subject] == level_and_check
    assert words.format(*(host.address for host in hosts.hosts), hosts.storage) in found.found


def test_a_storage_that_is_another_folder_on_a_node(hosts, unwell, tmp_path):
    place = hosts.storage
    with hosts.hosts[1].mounted(place, "--bind", tmp_path):
        found = unwell()
    assert {one.subject for one in found} == {"storage"}
    assert {one.level for one in found} == {"fault"}
    (its,) = [one.found for one in found if one.found.startswith(f"{hosts.hosts[1].address} does not see")]
    assert f"in {place} what" in its
    assert len(found) == 3  # neither do the two others see what this one wrote
    assert list(place.iterdir()) == list(tmp_path.iterdir()) == []


def test_a_storage_that_is_not_there_on_a_node_is_not_made(hosts, unwell):
    hidden = hosts.storage.parent
    with hosts.hosts[0].mounted(hidden, "-t", "tmpfs", "none"):
        found = unwell()
        assert levels_and_checks(found) == [("fault", "storage")]
        assert "there is no such folder" in found[0].found
        assert hosts.hosts[0].inside("ls", hidden) == ""


def test_a_slow_link(hosts, probes):
    slow = hosts.hosts[1]
    shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "160mbit", "burst", "64kb", "latency", "100ms"]
    with during(lambda: slow.inside(*shape), lambda: slow.inside("tc", "qdisc", "del", "dev", "eth0", "root")):
        speeds, found = links.measure_links(probes.nodes, probes.cluster, lambda text: None)
    assert levels_and_checks(found) == [("warning", "links")] * 2 + [("ok", "all-reduce")]
    assert all(slow.address in one.found for one in found[:2])
    # a message goes there at the wire's speed and back at 20 MB/s: of both ways, twice that
    assert 20e6 < speeds.between_nodes.bytes_per_s < 44e6


def test_workers_that_find_no_place(hosts, probes, monkeypatch):
    import ray

    monkeypatch.setattr(links, "PLACE_S", 3.0)
    taken = probes.nodes[1]
    holder = start_on(taken.id, links.LinkActor, num_cpus=2)
    try:
        ray.get(holder.ready.remote(taken.address, False), timeout=PATIENCE_S)
        speeds, found = links.measure_links([taken, replace(taken, name="again")], probes.cluster, lambda text: None)
    finally:
        ray.kill(holder)
    assert speeds is None
    assert levels_and_checks(found) == [("fault", "placement")] * 2
    assert found[0].found == f"{taken.name}: 1 of 1 workers are not ready: no answer in 3 s"


def gpipe(hosts, folder, *words):
    variables = environment() | {"RAY_ADDRESS": hosts.address, "COLUMNS": "300"}
    done = subprocess.run(command(*words), cwd=folder, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_whole_examination_of_a_cluster_and_a_plan_on_what_it_found(hosts, probes, tmp_path):
    """The commands as they are typed, beside a worker on each node: the links that the doctor kept are the plan's."""
    said = gpipe(hosts, tmp_path, "doctor", "--storage", str(hosts.storage))
    assert "\nfault" not in said
    for subject in ("versions", "devices", "storage", "links", "all-reduce"):
        assert f" {subject}" in said
    (kept,) = (tmp_path / ".cache").glob("links-*.json")
    speeds = read_links(tmp_path / ".cache", json.loads(kept.read_text())["cluster"])
    assert speeds.cluster == hosts.address
    for link in (speeds.between_nodes, speeds.all_reduce):
        assert 0 < link.latency_s < 1
        assert 1e6 < link.bytes_per_s < 1e12
    settings = "pipeline.stages=3 pipeline.replicas=1"  # more than the two cores of a node
    planned = json.loads(gpipe(hosts, tmp_path, "plan", "t128_6b", "--set", settings, "--format", "json"))
    speed = f"{speeds.between_nodes.latency_s * 1e3:.2f} ms, {speeds.between_nodes.bytes_per_s / 1e6:,.0f} MB/s"
    assert f"the network between nodes, measured by gpipe doctor: {speed}" in planned["notes"]
    assert (len(planned["nodes"]), len(set(planned["nodes"]))) == (3, 2)
    assert planned["measured"]


def test_a_node_that_says_nothing(hosts, unwell):
    silent = hosts.hosts[1]
    with silent.stopped():
        found = unwell(seconds=4)
    assert levels_and_checks(found) == [("fault", "nodes")]
    assert found[0].found == f"{silent.address} does not answer: no answer in 4 s"
