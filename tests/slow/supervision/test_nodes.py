"""Nodes of a Ray cluster: one is lost with a spare at hand, without one; a worker is killed; one is stopped."""

import json
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from experiments.registry import read_experiment_file
from launch.runs.store import RunFolder
from launch.watching.run_state import read_state
from launch.worker.heartbeat import read_heartbeats
from tests.faults import bad_node
from tests.faults.injection import VARIABLE, hook
from tests.launch.command_line import SMALL_1F1B, gpipe, losses, only_run
from tests.slow.running import EXPERIMENT, Running

SETTINGS = (
    SMALL_1F1B.replace("micro_batches=3", "micro_batches=4").replace("checkpoint_every=3", "checkpoint_every=5")
    + " pipeline.stages=2 tracking.wandb=disabled train.device_timeout_s=20 "
)
STEPS = 400
GOES_ON_S = 60.0
ACTORS_STAY_S = 15.0
"""With a new stage process of the same actors, rather than new processes of Ray."""


class Machines:
    """A cluster on this machine: a head without devices, and nodes that can be removed."""

    def __init__(self, nodes):
        self.cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(nodes)]
        self.cluster.wait_for_nodes()

    def remove(self, node_id):
        (node,) = [node for node in self.nodes if node.node_id == node_id]
        self.cluster.remove_node(node, allow_graceful=False)

    def end(self):
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture
def machines(ended):
    return lambda nodes: ended(Machines(nodes))


class Driver(Running):
    """A run through Ray on a cluster, as a person starts it."""

    def __init__(self, folder, settings, before=(), **variables):
        super().__init__(folder, [*before, *EXPERIMENT, "--set", settings], **variables)

    @property
    def run(self):
        return only_run(self.folder)

    def training(self, step):
        """Whether the newest metrics are past a step."""
        files = list(self.folder.glob("runs/*/*/metrics.jsonl"))
        return bool(files) and len(files[0].read_text().splitlines()) > step

    def heartbeats(self):
        """Returns those of the last attempt, by replica and stage."""
        run = RunFolder(self.run)
        found = read_heartbeats(run.heartbeats, read_state(run).attempts[-1]["attempt"])
        return {(heartbeat.replica, heartbeat.stage): heartbeat for heartbeat in found}

    def attempts(self):
        return [json.loads(line) for line in (self.run / "attempts.jsonl").read_text().splitlines()]

    def first_failure(self):
        return next(line for line in self.attempts() if line.get("outcome") == "failed")

    def recovered_s(self):
        """Returns the seconds until the next attempt's first step; None before it."""
        return next((line["recovered_s"] for line in self.attempts() if "recovered_s" in line), None)

    def losses(self):
        return losses(self.run)


@pytest.fixture
def drive(tmp_path, ended):
    def start(machines, settings="", steps=STEPS):
        settings = f"{SETTINGS} train.steps={steps} {settings}"
        return ended(Driver(tmp_path, settings, RAY_ADDRESS=machines.cluster.address))

    return start


def gone_on(driver, begin):
    """Waits for the second attempt's first step; returns the seconds since ``begin``."""
    driver.until(driver.recovered_s, GOES_ON_S + 30)
    return time.monotonic() - begin


def undisturbed_losses(folder, settings):
    """Returns the losses of a run that nothing happens to, in plain processes."""
    gpipe(folder, *EXPERIMENT[3:], "--launcher", "local", "--set", settings)
    return losses(only_run(folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), f"{SETTINGS} train.steps={STEPS}")


def test_a_lost_node_is_replaced_by_a_spare(machines, drive, undisturbed):
    cluster = machines(3)
    driver = drive(cluster)
    driver.until(lambda: driver.training(12))
    begin = time.monotonic()
    cluster.remove(driver.heartbeats()[0, 1].node)
    assert gone_on(driver, begin) < GOES_ON_S
    failure = driver.first_failure()
    assert (failure["kind"], failure["stage"]) == ("node", 1), failure
    driver.wait()
    assert driver.losses() == undisturbed


def test_without_a_spare_an_elastic_run_goes_on_with_another_k(machines, drive, undisturbed):
    cluster = machines(2)
    driver = drive(cluster, "train.elastic=true")
    driver.until(lambda: driver.training(12))
    begin = time.monotonic()
    cluster.remove(driver.heartbeats()[0, 1].node)
    assert gone_on(driver, begin) < GOES_ON_S
    assert driver.first_failure()["kind"] == "node"
    assert "1 of 2 devices are available: K 2 -> 1" in driver.printed.replace("\n", " ")
    driver.wait()
    np.testing.assert_allclose(driver.losses(), undisturbed, rtol=1e-6, atol=0)
    asked = read_experiment_file(driver.run / "experiment.toml")
    assert asked.pipeline.stages == 2  # what a resume goes back to
    shapes = [(line["K"], line["R"], line["M"]) for line in driver.attempts() if "began" in line]
    assert shapes == [(2, 1, 4), (1, 1, 4)]


def test_without_a_spare_a_rigid_run_ends_with_one_sentence(machines, drive):
    cluster = machines(2)
    driver = drive(cluster)
    driver.until(lambda: driver.training(12))
    cluster.remove(driver.heartbeats()[0, 1].node)
    driver.wait(GOES_ON_S, code=2)
    printed = driver.printed.replace("\n", " ")
    assert "The run needs 2 devices; 1 are left" in printed
    assert "gpipe resume " in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("blow", ["kill", "stop"])
def test_a_struck_worker_on_a_node_of_its_own_is_replaced_and_no_bit_is_lost(
    machines, drive, monkeypatch, undisturbed, blow
):
    cluster = machines(2)
    monkeypatch.setenv(VARIABLE, hook([{"fault": blow, "stage": 1, "step": 22, "action": "B1"}]))
    driver = drive(cluster)
    driver.wait()
    failure = driver.first_failure()
    log = (driver.run / "logs" / "stage-0-1.log").read_text()
    struck = float(next(line for line in log.splitlines() if line.startswith("fault ")).rsplit(None, 1)[1])
    assert (failure["kind"], failure["stage"], failure["action"]) == ("death" if blow == "kill" else "stall", 1, "B1")
    assert failure.get("named", failure["ended"]) - struck < 10
    assert failure["ended"] - struck + driver.recovered_s() < (ACTORS_STAY_S if blow == "kill" else GOES_ON_S)
    assert driver.losses() == undisturbed


@pytest.mark.parametrize("struck", ["forkserver", "StageActor"])
def test_what_starts_a_worker_is_replaced_and_no_bit_is_lost(machines, drive, undisturbed, struck):
    """A StageActor starts a forkserver, which starts a stage process for each attempt."""
    driver = drive(machines(2))
    driver.until(lambda: driver.training(12))
    forkserver = psutil.Process(driver.heartbeats()[0, 1].pid).parent()
    begin = time.monotonic()
    (forkserver if struck == "forkserver" else forkserver.parent()).kill()
    assert gone_on(driver, begin) < GOES_ON_S
    failure = driver.first_failure()
    assert failure["kind"] == "death", failure
    assert ("forkserver" in failure["message"]) == (struck == "forkserver"), failure
    driver.wait()
    assert driver.losses() == undisturbed


def test_a_node_whose_worker_fails_twice_at_its_start_is_left_out_for_a_spare(
    machines, drive, monkeypatch, tmp_path, undisturbed
):
    monkeypatch.setenv(VARIABLE, f"{Path(bad_node.__file__).resolve()}:fail[{tmp_path / 'bad'}]")
    driver = drive(machines(3))
    driver.wait()
    printed = driver.printed.replace("\n", " ")
    assert "uncorrectable ECC error" in printed
    assert "is left out, because others have free devices" in printed
    outcomes = [line["outcome"] for line in driver.attempts() if "outcome" in line]
    assert outcomes == ["failed", "failed", "done"]
    assert driver.losses() == undisturbed
