"""The probe of a cluster with a node that does not respond for some seconds, or until the end."""

import os
import signal
import threading

import pytest
import ray
from ray.cluster_utils import Cluster

from launch import node_probe
from launch.jobs.client import JobError
from launch.jobs.preflight import check_probe_report


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = made.add_node(num_cpus=3)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False)
    yield second
    ray.shutdown()
    made.shutdown()


def probe(second, monkeypatch, stopped_s, deadline_s):
    """Returns the probe's reports while the second node's Ray process is stopped for ``stopped_s``."""
    monkeypatch.setattr(node_probe, "NODE_S", deadline_s)
    monkeypatch.setattr(node_probe, "RETRY_S", 2.0)
    (raylet,) = second.all_processes["raylet"]
    alive = [node for node in ray.nodes() if node["Alive"]]
    os.kill(raylet.process.pid, signal.SIGSTOP)
    resume = threading.Timer(stopped_s, os.kill, (raylet.process.pid, signal.SIGCONT))
    resume.start()
    try:
        reports = node_probe.probe_nodes(alive, {node["NodeID"]: ([], "", "", "", "") for node in alive})
    finally:
        resume.join()
    return reports, reports[second.node_id]


def test_a_node_that_is_busy_for_longer_than_one_attempt_is_probed_again(cluster, monkeypatch):
    reports, second = probe(cluster, monkeypatch, stopped_s=6, deadline_s=60)
    assert [report["fault"] for report in reports.values()] == ["", ""]
    assert second["python"]


def test_a_node_that_does_not_answer_is_described(cluster, monkeypatch):
    reports, second = probe(cluster, monkeypatch, stopped_s=8, deadline_s=5)
    assert sorted("python" in report for report in reports.values()) == [False, True]
    assert "did not answer 3 tries in 5 s; Ray lists it as alive, 3 of its 3 CPUs free" in second["fault"]
    head = {"python": "3.11.2", "executable": "p", "storage": "/s", "home": "/h", "fault": "", "versions": {}}
    with pytest.raises(JobError, match=r"did not answer 3 tries .* try again when it is less busy"):
        check_probe_report(head | {"nodes": list(reports.values())}, {}, "/s", "3.11.7")
