"""The probe of a cluster, and how its report is judged; without a cluster."""

import os
import subprocess
import sys

import pytest
import ray

from experiments.custom.own_imports import ROOT
from launch import node_probe
from launch.jobs.client import JobError
from launch.jobs.preflight import check_probe_report
from launch.jobs.requirements import pinned_requirements
from launch.runs.store import CACHE, SHARED_CACHE

PINS = {"torch": "2.13.0", "rich": "15.0.0"}


def node(**changes):
    report = {"host": "n", "address": "10.0.0.1", "python": "3.11.9", "versions": PINS, "shared": True, "fault": ""}
    return report | changes


def cluster(*nodes, **changes):
    report = {
        "python": "3.11.2",
        "executable": "/v/bin/python",
        "storage": "/s",
        "home": "/h",
        "fault": "",
        "versions": {"torch": "2.13.0+cpu", "rich": "15.0.0"},
    }
    return report | {"nodes": list(nodes or [node()])} | changes


def test_a_cluster_that_has_everything_gets_nothing_installed():
    environment = check_probe_report(cluster(node(), node()), PINS, "/s", "3.11.7")
    assert (environment.storage, environment.python, environment.install) == ("/s", "/v/bin/python", {})
    assert environment.lines[0] == "all 2 pinned packages are installed on the cluster"


def test_packages_that_differ_on_any_node_are_installed_and_named():
    environment = check_probe_report(
        cluster(node(), node(versions={"rich": "14.0.0", "torch": None})), PINS, "/s", "3.11.7"
    )
    assert environment.install["pip"]["packages"] == ["rich==15.0.0", "torch==2.13.0"]
    assert environment.python == "python"
    assert "each node first installs 2 packages" in environment.lines[0]
    assert "rich 15.0.0 (found: 14.0.0), torch 2.13.0 (found: none)" in environment.lines[0]


def test_with_a_url_runs_are_on_the_head_and_checkpoints_and_copies_at_the_url():
    environment = check_probe_report(cluster(storage="s3://b/x"), PINS, "s3://b/x", "3.11.7")
    assert (environment.storage, environment.url) == ("/h", "s3://b/x")
    assert "s3://b/x" in environment.lines[1]


def test_a_job_uses_the_submitters_cache_if_the_head_and_all_nodes_see_it(tmp_path):
    ours = check_probe_report(cluster(node(cache=True), node(cache=True), cache=True), PINS, "/s", "3.11.7")
    assert ours.cache == str(CACHE.resolve())
    assert f"cache: {ours.cache}, shared with the head and all nodes" in ours.lines[2]
    for report in (
        cluster(node(cache=True), node(cache=False), cache=True),
        cluster(node(cache=True), cache=False),
    ):
        assert check_probe_report(report, PINS, "/s", "3.11.7").cache == ""
    (tmp_path / "marker").touch()
    assert node_probe.probe_node([], "", "", "", str(tmp_path / "marker"))["cache"]
    assert not node_probe.probe_node([], "", "", "", str(tmp_path / "other"))["cache"]
    variables = {**os.environ, "GPIPE_STORAGE": "/s", SHARED_CACHE: str(tmp_path)}
    code = "from launch.runs.store import CACHE; print(CACHE)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path}\n", done.stderr


@pytest.mark.parametrize(
    ("report", "storage", "parts"),
    [
        (
            cluster(node(python="3.12.1")),
            "/s",
            [r"n \(10.0.0.1\) runs Python 3.12.1, this machine Python 3.11.7"],
        ),
        (cluster(python="3.10.4"), "/s", ["the head runs Python 3.10.4"]),
        (cluster(node(), node(), storage=""), "", ["the cluster has 2 nodes", "give --storage"]),
        (
            cluster(node(), node(host="m", shared=False)),
            "/s",
            ["not the same folder", "1 of 2", r"m \(10.0.0.1\)"],
        ),
        (
            cluster(node(fault="OSError: full")),
            "/s",
            [r"node n \(10.0.0.1\) cannot write to storage /s: OSError: full"],
        ),
        (cluster(fault="OSError: read-only"), "/s", ["the head cannot write to storage /s: OSError: read-only"]),
        (
            cluster({"host": "m", "address": "b", "fault": "did not answer"}),
            "/s",
            [r"node m \(b\) cannot be used", "answer"],
        ),
    ],
)
def test_a_cluster_that_cannot_run_a_job_is_rejected(report, storage, parts):
    with pytest.raises(JobError) as rejected:
        check_probe_report(report, PINS, storage, "3.11.7")
    for part in parts:
        rejected.match(part)


def test_the_probe_finds_a_run_by_its_name_and_id_or_its_id(tmp_path):
    (tmp_path / "runs/net/1").mkdir(parents=True)
    (tmp_path / "runs/net/1/experiment.toml").touch()
    for storage in (str(tmp_path), f"file://{tmp_path}"):
        assert [node_probe.has_run(storage, run) for run in ("net/1", "1", "net/2", "2")] == [
            True,
            True,
            False,
            False,
        ]


def test_a_probe_reports_versions_and_visible_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(node_probe, "SETTLE_S", 0.1)
    assert node_probe.installed_versions(["rich", "no-such-package"]) == {
        "rich": pinned_requirements(ROOT)["rich"], "no-such-package": None,
    }  # fmt: skip
    storage, other = tmp_path / "storage", tmp_path / "other"
    other.mkdir()
    assert node_probe.write_marker(str(storage), "mark") == node_probe.MISSING
    assert node_probe.probe_node([], str(storage), "mark", "own")["fault"] == node_probe.MISSING
    assert not storage.exists()
    storage.mkdir()
    assert node_probe.write_marker(str(storage), "mark") == ""
    report = node_probe.probe_node([], str(storage), "mark", "own")
    assert (report["shared"], report["fault"]) == (True, "")
    assert node_probe.unseen_markers(str(storage), ["mark", "own", "none"], 0.1) == ["none"]
    node_probe.remove_markers(str(storage), ["mark", "own", "none"])
    assert list(storage.iterdir()) == []
    assert not node_probe.probe_node([], str(other), "mark", "own")["shared"]


def test_a_library_that_a_storage_lacks_is_named(monkeypatch):
    def no_library(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(node_probe, "open_store", no_library)
    on_node = node_probe.probe_node([], "s4://bucket", "mark", "own")["fault"]
    for fault in (node_probe.write_marker("s4://bucket", "mark"), on_node):
        assert fault.startswith("its library is missing: Install s3fs to access S3, on every node")


A, B = 56 * "a", 56 * "b"


class Result:
    """The future of a task."""

    def __init__(self, node):
        self.node = node


@pytest.fixture
def failing_node(monkeypatch):
    """Probes a cluster whose node A reports with errors; returns the reports and the nodes that were probed."""
    errors, calls = [], []

    class Task:
        def options(self, scheduling_strategy, **_):
            self.node = scheduling_strategy.node_id
            return self

        def remote(self, *_):
            calls.append(self.node)
            return Result(self.node)

    def get(result, timeout):
        if result.node == A and errors:
            raise errors.pop(0)
        return {"fault": ""}

    monkeypatch.setattr(ray, "remote", lambda _: Task())
    monkeypatch.setattr(ray, "wait", lambda results, num_returns, timeout: (results[:1], results[1:]))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in (A, B)])
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", dict)
    monkeypatch.setattr(node_probe, "RETRY_S", 0.01)

    def probe(*node_errors):
        errors.extend(node_errors)
        alive = [{"NodeID": node, "NodeManagerHostname": node, "Resources": {"CPU": 2}} for node in (A, B)]
        return node_probe.probe_nodes(alive, dict.fromkeys([A, B], ())), calls

    return probe


def test_a_node_that_fails_three_times_in_the_same_way_is_not_probed_again(failing_node):
    reports, calls = failing_node(*(OSError() for _ in range(9)))  # an error without a text
    assert (calls.count(A), calls.count(B)) == (3, 1)
    assert "failed there 3 times in the same way: OSError; Ray lists it as alive" in reports[A]["fault"]
    with pytest.raises(JobError, match=r"node a+ .* cannot be used: the probe failed there 3 times"):
        check_probe_report(cluster(reports[A] | {"address": "x"}), PINS, "/s", "3.11.7")


def test_a_node_whose_errors_differ_is_probed_again(failing_node):
    reports, calls = failing_node(OSError("one"), OSError("two"), OSError("one"), OSError("one"))
    assert calls.count(A) == 5
    assert reports == {A: {"fault": ""}, B: {"fault": ""}}
