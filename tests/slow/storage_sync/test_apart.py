"""A node that shares no folder with the driver's: the run's files are carried, checkpoints go to a URL."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from tests.faults.injection import VARIABLE, hook
from tests.launch.command_line import command, environment
from tests.slow.jobs_head import PATIENT
from tests.slow.supervision import test_nodes
from tests.slow.supervision.test_nodes import Driver, losses

STEPS = 40

undisturbed = test_nodes.undisturbed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a folder of its own for a node takes root's right to mount")


class Apart:
    """A head with one device, and a node with one whose folder at ``private`` is a disk of its own."""

    def __init__(self, private):
        self.cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        mount = f"mount -t tmpfs none {private}"
        join = f"{Path(sys.executable).parent}/ray start --address={self.cluster.address} --num-cpus=1 --block"
        self.node = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", f"{mount} && exec {join}"], start_new_session=True,
            env=environment() | PATIENT, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        finally:
            ray.shutdown()

    def _wait(self):
        end = time.monotonic() + 120  # on a busy machine a node takes more than a minute to start
        ray.init(address=self.cluster.address, log_to_driver=False)
        while sum(node["Alive"] for node in ray.nodes()) < 2:
            assert time.monotonic() < end, "the node did not come"
            time.sleep(0.2)

    def end(self):
        os.killpg(self.node.pid, signal.SIGTERM)
        try:
            self.node.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.node.pid, signal.SIGKILL)
        self.cluster.shutdown()


@pytest.fixture
def apart(tmp_path):
    private = tmp_path / "work"
    private.mkdir()
    made = Apart(private)
    yield made
    made.end()


@pytest.fixture
def drive(tmp_path):
    made = []

    def start(machines, settings):
        made.append(Driver(tmp_path / "work", machines, settings, STEPS))
        return made[-1]

    yield start
    for one in made:
        one.end()


def test_a_run_over_nodes_that_share_nothing_is_whole_and_survives_a_kill(
    apart,
    drive,
    undisturbed,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv(VARIABLE, hook([{"fault": "kill", "stage": 1, "step": 22, "action": "B1"}]))
    driver = drive(apart, f"train.checkpoint_dir=file://{tmp_path}/checkpoints")
    driver.wait(300)
    assert "the run's folder is not shared, its files are copied" in driver.printed.replace("\n", " ")
    hosts = {beat.stage: beat.node for beat in driver.heartbeats().values()}
    assert len(set(hosts.values())) == 2
    failure = next(line for line in driver.attempts() if line.get("outcome") == "failed")
    assert (failure["kind"], failure["stage"], failure["action"]) == ("death", 1, "B1")
    assert losses(driver) == undisturbed[:STEPS]
    run = driver.run
    assert (run / "record.json").exists()
    assert {path.name for path in (run / "logs").iterdir()} == {"stage-0-0.log", "stage-0-1.log"}
    assert (run / "timeline.png").exists()


def test_a_resumed_run_outlives_the_heartbeats_of_the_earlier_one(apart, drive, tmp_path, monkeypatch):
    """Files of the first attempt lie on both nodes; the second one lasts longer than a worker may be silent."""
    driver = drive(apart, f"train.checkpoint_dir=file://{tmp_path}/checkpoints")
    driver.wait(300)
    pauses = [{"fault": "sleep", "stage": 1, "step": step, "action": "B1", "seconds": 5} for step in (42, 44, 46)]
    variables = {"RAY_ADDRESS": apart.cluster.address, VARIABLE: hook(pauses)}
    start = time.monotonic()
    subprocess.run(
        command("resume", str(driver.run), "--set", f"train.steps={STEPS + 10}"), cwd=driver.folder,
        env=environment() | variables, check=True, timeout=300,
    )  # fmt: skip
    assert time.monotonic() - start > 15
    outcomes = [line["outcome"] for line in driver.attempts() if "outcome" in line]
    assert outcomes == ["done", "done"], driver.attempts()


def test_without_a_place_for_checkpoints_it_is_refused_by_node(apart, drive):
    driver = drive(apart, "")
    driver.wait(200, code=2)
    printed = driver.printed.replace("\n", " ")
    assert "1 nodes do not share the run's folder" in printed
    assert "train.checkpoint_dir=s3://..." in printed
    assert "Traceback" not in printed
