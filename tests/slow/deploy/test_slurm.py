"""The Slurm script with a real Ray on two nodes that are this machine; srun and scontrol are stand-ins for Slurm's."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.command_line import SMALL, environment, losses, only_run

SCRIPT = Path(__file__).parents[3] / "launch" / "deploy" / "slurm" / "train.sbatch"
RUN = ("python", "-m", "launch.cli", "experiment", "t24_1_3b_wide", "--scale", "laptop", "--set")
STAND_INS = {
    "scontrol": "hostname; hostname",
    "srun": 'echo "$@" >> calls; while [[ $1 == --* ]]; do shift; done; exec "$@"',
}


class Allocation:
    """Two nodes of one core each."""

    def __init__(self, folder):
        self.folder, self.id = folder, str(os.getpid())
        for name, script in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/bash\n{script}\n")
            (folder / name).chmod(0o755)

    def start(self, *command):
        programs = f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": self.id, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "1"}
        with (self.folder / "printed").open("w") as log:
            return subprocess.Popen(
                ["bash", SCRIPT, *command], cwd=self.folder, stdout=log, stderr=subprocess.STDOUT,
                env={**environment(), **slurm, "PATH": programs, "GPIPE_STORAGE": str(self.folder)},
            )  # fmt: skip

    @property
    def printed(self):
        return (self.folder / "printed").read_text()

    def rays(self):
        """What is left of the job's Ray: processes that have its folder on their command line."""
        left = []
        for process in psutil.process_iter(["cmdline"]):
            if f"/tmp/ray-{self.id}" in " ".join(process.info["cmdline"] or ()):
                left.append(process)
        return left


@pytest.fixture
def allocation(tmp_path):
    made = Allocation(tmp_path)
    yield made
    for process in made.rays():
        process.kill()
    shutil.rmtree(f"/tmp/ray-{made.id}", ignore_errors=True)


def test_a_run_over_two_nodes_and_ray_is_gone_with_it(allocation):
    job = allocation.start(*RUN, f"{SMALL} train.steps=6 pipeline.stages=2 tracking.wandb=disabled")
    assert job.wait(400) == 0, allocation.printed
    assert "Ray is up on 2 nodes" in allocation.printed
    assert stat.S_IMODE(Path(f"/tmp/ray-{allocation.id}").stat().st_mode) == 0o700
    assert len(losses(only_run(allocation.folder))) == 6
    assert allocation.rays() == []
    head, other = (allocation.folder / "calls").read_text().splitlines()
    assert "--head" in head
    assert re.search(r"--address=\d", other)
    for line in (head, other, allocation.printed):
        assert not re.search("[0-9a-f]{64}", line)  # the token


def test_a_command_that_fails_ends_the_job_with_its_code(allocation):
    # the command is where the run is: the cluster of two nodes, which lets it in by the token
    script = "import ray, sys; ray.init(); sys.exit(5 + int(ray.cluster_resources()['CPU']))"
    job = allocation.start("python", "-c", script)
    assert job.wait(400) == 7, allocation.printed
    assert allocation.rays() == []


def test_a_job_whose_time_is_up_ends_the_run_so_that_it_can_go_on(allocation):
    job = allocation.start(*RUN, f"{SMALL} train.steps=100000 pipeline.stages=2 tracking.wandb=disabled")
    end = time.monotonic() + 400
    while not list(allocation.folder.glob("runs/*/*/checkpoints/*/manifest.json")):
        assert job.poll() is None, allocation.printed
        assert time.monotonic() < end, allocation.printed
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)  # as --signal=B:TERM@120 does, to the script alone
    assert job.wait(60) == 143, allocation.printed
    saved = max(int(path.parent.name) for path in allocation.folder.glob("runs/*/*/checkpoints/*/manifest.json"))
    assert len(losses(only_run(allocation.folder))) == saved
    assert f" continues from the checkpoint of step {saved}" in allocation.printed
    assert allocation.rays() == []


def test_a_folder_that_other_users_can_enter_is_refused(allocation):
    folder = Path(f"/tmp/ray-{allocation.id}")
    folder.mkdir()
    folder.chmod(0o777)
    assert allocation.start("true").wait(100) != 0
    assert f"error: {folder} is not a folder of this user alone; remove it on " in allocation.printed
    assert list(folder.iterdir()) == []
