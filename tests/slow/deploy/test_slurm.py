"""The Slurm script with a real Ray on two nodes that are this machine; srun and scontrol are stand-ins for Slurm's."""

import os
import re
import shutil
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.command_line import SMALL, losses, only_run
from tests.slow.running import Running

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
        return Running(self.folder, ["bash", SCRIPT, *command], PATH=programs, GPIPE_STORAGE=str(self.folder), **slurm)

    def rays(self):
        """What is left of the job's Ray: processes that have its folder on their command line."""
        processes = psutil.process_iter(["cmdline"])
        return [one for one in processes if f"/tmp/ray-{self.id}" in " ".join(one.info["cmdline"] or ())]


@pytest.fixture
def allocation(tmp_path):
    made = Allocation(tmp_path)
    yield made
    for process in made.rays():
        process.kill()
    shutil.rmtree(f"/tmp/ray-{made.id}", ignore_errors=True)


def test_a_run_over_two_nodes_and_ray_is_gone_with_it(allocation):
    job = allocation.start(*RUN, f"{SMALL} train.steps=6 pipeline.stages=2 tracking.wandb=disabled")
    job.wait()
    assert "Ray is up on 2 nodes" in job.printed
    assert stat.S_IMODE(Path(f"/tmp/ray-{allocation.id}").stat().st_mode) == 0o700
    assert len(losses(only_run(allocation.folder))) == 6
    assert allocation.rays() == []
    head, other = (allocation.folder / "calls").read_text().splitlines()
    assert "--head" in head
    assert re.search(r"--address=\d", other)
    for line in (head, other, job.printed):
        assert not re.search("[0-9a-f]{64}", line)  # the token


def test_a_command_that_fails_ends_the_job_with_its_code(allocation):
    # the command is where the run is: the cluster of two nodes, which lets it in by the token
    script = "import ray, sys; ray.init(); sys.exit(5 + int(ray.cluster_resources()['CPU']))"
    job = allocation.start("python", "-c", script)
    job.wait(code=7)
    assert allocation.rays() == []


def test_a_job_whose_time_is_up_ends_the_run_so_that_it_can_go_on(allocation):
    job = allocation.start(*RUN, f"{SMALL} train.steps=100000 pipeline.stages=2 tracking.wandb=disabled")
    saves = "runs/*/*/checkpoints/*/manifest.json"
    # these take seconds; the driver waits for a save from the first heartbeat on, half a second after the first step
    job.until(lambda: any(int(path.parent.name) > 100 for path in allocation.folder.glob(saves)))
    job.process.send_signal(signal.SIGTERM)  # as --signal=B:TERM@120 does, to the script alone
    job.wait(60, code=143)
    saved = max(int(path.parent.name) for path in allocation.folder.glob(saves))
    assert len(losses(only_run(allocation.folder))) == saved
    assert f" continues from the checkpoint of step {saved}" in job.printed
    assert allocation.rays() == []


def test_a_folder_that_other_users_can_enter_is_refused(allocation):
    folder = Path(f"/tmp/ray-{allocation.id}")
    folder.mkdir()
    folder.chmod(0o777)
    job = allocation.start("true")
    assert job.process.wait(100) != 0
    assert f"error: {folder} is not a folder of this user alone; remove it on " in job.printed
    assert list(folder.iterdir()) == []
