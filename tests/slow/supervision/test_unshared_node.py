"""A node that does not see the run's folder: the run is refused before its workers start."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from tests.slow.jobs_head import PATIENT
from tests.slow.running import Running
from tests.slow.supervision.test_nodes import SETTINGS, Driver

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a folder of its own for a node takes root's right to mount")


class Apart:
    """A head with one device, and a node with one whose folder at ``private`` is a disk of its own."""

    def __init__(self, private):
        self.cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        mount = f"mount -t tmpfs none {private}"
        join = f"{Path(sys.executable).parent}/ray start --address={self.cluster.address} --num-cpus=1 --block"
        command = ["unshare", "--mount", "sh", "-c", f"{mount} && exec {join}"]
        self.node = Running(private.parent, command, **PATIENT)
        try:
            ray.init(address=self.cluster.address, log_to_driver=False)
            # on a busy machine a node takes more than a minute to start
            self.node.until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 120)
        except BaseException:
            self.end()
            raise
        finally:
            ray.shutdown()

    def end(self):
        os.killpg(self.node.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.node.process.wait(20)
        self.node.end()
        self.cluster.shutdown()


@pytest.fixture
def apart(tmp_path, ended):
    private = tmp_path / "work"
    private.mkdir()
    return ended(Apart(private))


@pytest.mark.parametrize("unseen", ["the prepared data", "the run's folder"])
def test_it_is_named_with_the_folder_and_no_worker_starts(apart, ended, tmp_path, monkeypatch, unseen):
    """With checkpoints elsewhere too: the node would write its log into a folder of its own."""
    monkeypatch.setenv("GPIPE_CACHE", str(tmp_path / ("work/.cache" if unseen == "the prepared data" else "shared")))
    monkeypatch.setenv("GPIPE_STORAGE", str(tmp_path / ("shared" if unseen == "the prepared data" else "work")))
    settings = f"{SETTINGS} train.steps=40 train.checkpoint_dir=file://{tmp_path}/checkpoints"
    driver = ended(Driver(tmp_path / "work", settings, RAY_ADDRESS=apart.cluster.address))
    driver.wait(code=2)
    printed = driver.printed.replace("\n", " ")
    place = tmp_path / "work" / (".cache" if unseen == "the prepared data" else "runs")
    assert f"does not see the folder {place}/" in printed
    assert "mount it there at the same path" in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.glob("*/**/runs/*/*/logs/*"))
    assert not list(tmp_path.glob("*/**/.gpipe-*"))
