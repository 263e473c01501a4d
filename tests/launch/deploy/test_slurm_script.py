"""The Slurm script, on an allocation of one node."""

import os
import re
import subprocess
import sys

import pytest

from tests.launch.deploy.files import ROOT, SLURM, asked_of_slurm, text


@pytest.fixture
def allocation(tmp_path):
    """Runs the script as Slurm would on an allocation of one node; ``ray`` is a stand-in that notes its calls."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()

    def stand_in(name, script):
        (bin_folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (bin_folder / name).chmod(0o755)

    stand_in("scontrol", "echo node-1")
    stand_in("srun", f'echo "$@" >> {tmp_path}/calls; while [[ $1 == --* ]]; do shift; done; exec "$@"')
    stand_in("ray", "exit 3")
    stand_in("python", f'exec {sys.executable} "$@"')

    def run(*command, **variables):
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-1", "SLURM_CPUS_PER_TASK": "2"}
        return subprocess.run(
            ["bash", ROOT / SLURM, *command],
            env={**os.environ, **slurm, "PATH": f"{bin_folder}:{os.environ['PATH']}", **variables},
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    return run


def test_the_slurm_script_asks_for_what_its_job_needs():
    subprocess.run(["bash", "-n", ROOT / SLURM], check=True)
    asked = asked_of_slurm()
    assert asked["ntasks-per-node"] == "1"
    assert asked["signal"] == "B:TERM@120"
    assert "no-kill" in asked
    assert "exclusive" in asked
    assert "python -m launch.cli experiment t128_6b --scale paper; fi" in text(SLURM)


def test_without_shared_storage_nothing_is_started(allocation, tmp_path):
    done = allocation("echo", "ran", GPIPE_STORAGE="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: GPIPE_STORAGE is not set; name a folder that all nodes share")
    assert not (tmp_path / "calls").exists()


def test_ray_that_does_not_start_ends_the_job_before_the_command(allocation, tmp_path):
    done = allocation("touch", "ran", GPIPE_STORAGE=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: Ray ended on a node while it started; the reason is above"
    assert not (tmp_path / "ran").exists()
    called = (tmp_path / "calls").read_text()
    assert "--head" in called
    assert "--num-cpus=2" in called
    assert not re.search("[0-9a-f]{64}", called)  # the token
