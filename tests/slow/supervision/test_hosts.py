"""Ray over hosts with addresses of their own, as near to several machines as one comes: trained across, one cut off.

Needs root, for network namespaces. A host is cut off at the switch: nobody is told, packets to and from it are lost.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.hosts.bridged_hosts import BridgedHosts, on_host
from tests.launch.command_line import SMALL
from tests.slow.running import Running
from tests.slow.supervision.test_nodes import Driver, undisturbed_losses

SETTINGS = (
    SMALL.replace("micro_batches=3", "micro_batches=4").replace("checkpoint_every=3", "checkpoint_every=5")
    + " pipeline.stages=3 pipeline.replicas=2 tracking.wandb=disabled train.device_timeout_s=20"
)
STEPS = 200
CPUS = 2

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


class RayHosts:
    """A Ray node of two CPUs on each of some hosts, the head on the first; a token opens them."""

    def __init__(self, number, folder):
        self.hosts = BridgedHosts(number).__enter__()
        self.session = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # a short name: sockets
        self.address = f"{self.hosts.addresses[0]}:6379"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.variables = {**token, "RAY_ADDRESS": self.address}
        self.nodes = []
        for host in range(number):
            self.nodes.append(Running(folder, on_host(self.hosts, host, self.start(host)), **token))
            self.nodes[host].until(lambda node=self.nodes[host]: "Ray runtime started" in node.printed)

    def start(self, host):
        """Returns the command of a host's node."""
        role = [f"--address={self.address}"]
        if host == 0:
            role = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.session.name}"]
        command = [str(Path(sys.executable).with_name("ray")), "start", *role, f"--num-cpus={CPUS}", "--block"]
        return [*command, f"--node-ip-address={self.hosts.addresses[host]}", "--object-store-memory=100000000"]

    def host_of(self, pid):
        for host, name in enumerate(self.hosts.names):
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
            if str(pid) in listed.split():
                return host
        raise AssertionError(f"process {pid} runs in no host")

    def end(self):
        self.hosts.close()
        for node in self.nodes:
            node.end()
        self.session.cleanup()


@pytest.fixture
def over_hosts(tmp_path, ended):
    return lambda number: ended(RayHosts(number, tmp_path))


@pytest.fixture
def drive(tmp_path, ended):
    """Starts a run through Ray on the first host."""
    return lambda machines: ended(
        Driver(tmp_path, f"{SETTINGS} train.steps={STEPS}", on_host(machines.hosts, 0, []), **machines.variables)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), f"{SETTINGS} train.steps={STEPS}")


def test_three_hosts_train_to_the_bit_as_one_node_does(over_hosts, drive, undisturbed):
    machines = over_hosts(3)
    driver = drive(machines)
    driver.until(lambda: driver.training(5))
    hosts = {place: machines.host_of(beat.pid) for place, beat in driver.heartbeats().items()}
    driver.wait()
    assert sorted(hosts.values()) == [0, 0, 1, 1, 2, 2]
    assert driver.losses() == undisturbed


def cut_off(machines, driver):
    """Cuts off a host that holds workers and not the head."""
    machines.hosts.cut_off(max(machines.host_of(beat.pid) for beat in driver.heartbeats().values()))


def test_a_host_that_is_cut_off_is_replaced_by_a_spare(over_hosts, drive, undisturbed):
    machines = over_hosts(4)
    driver = drive(machines)
    driver.until(lambda: driver.training(12))
    cut_off(machines, driver)
    driver.until(driver.recovered_s)
    assert driver.first_failure()["kind"] == "node"
    driver.wait()
    assert driver.losses() == undisturbed


def test_a_host_that_is_cut_off_without_a_spare_ends_the_run_with_one_sentence(over_hosts, drive):
    machines = over_hosts(3)
    driver = drive(machines)
    driver.until(lambda: driver.training(12))
    cut_off(machines, driver)
    driver.wait(code=2)
    assert driver.first_failure()["kind"] == "node"
    assert "The run needs 6 devices; 4 are left" in driver.printed.replace("\n", " ")
    assert "Traceback" not in driver.printed
