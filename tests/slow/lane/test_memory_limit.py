"""Runs in a control group with hardly more memory than their plans need: none runs out of it."""

import json
import os
import subprocess

import pytest

from suite.pipeline.planning.devices import GIB
from tests.control_groups import control_groups
from tests.launch.command_line import command, environment

COMMON = (
    "train.steps=4 train.batch_tokens=32768 train.validate_every=none tracking.wandb=disabled trace=false "
    "pipeline.micro_batches=4"
)
ROUNDING = 1.02
"""A worker's process is a little larger or smaller when it is measured again."""


def gpipe(folder, *arguments, group=None):
    """Runs a command in a control group; it measures the layers there too."""

    def join():
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    variables = environment() | {"REMEASURE": "1"}
    return subprocess.run(
        command(*arguments), cwd=folder, env=variables, preexec_fn=join, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with prepared data: plans without it assume a sample."""
    folder = tmp_path_factory.mktemp("limited")
    run = ("experiment", "t12_400m", "--scale", "laptop", "--launcher", "local")
    done = gpipe(folder, *run, "--set", COMMON)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "pipeline",
    [
        "pipeline.stages=2 pipeline.schedule=1f1b pipeline.remat=never",
        "pipeline.stages=2 pipeline.schedule=fill_drain pipeline.remat=never",
        "pipeline.stages=2 pipeline.schedule=fill_drain pipeline.remat=always",
        "pipeline.stages=1 pipeline.replicas=2 pipeline.schedule=fill_drain pipeline.remat=never",
    ],
)
def test_a_run_that_its_plan_fits_into_the_memory_does_not_run_out(folder, pipeline):
    settings = f"{COMMON} {pipeline}"
    planned = gpipe(folder, "plan", "t12_400m", "--scale", "laptop", "--format", "json", "--set", settings)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    usable = 1 - plan["reserve_bytes"] / plan["device_bytes"]
    needed = plan["K"] * plan["R"] * max(stage["peak_bytes"] for stage in plan["stages"])
    limit = int(ROUNDING * needed / usable)
    cells = ",".join(map(str, plan["cells"]))  # those of other costs may need more
    settings = f"{settings} pipeline.layers_per_cell={cells}"
    with control_groups({"memory": {"memory.limit_in_bytes": limit}}, {"memory.max": limit}) as [group]:
        run = ("experiment", "t12_400m", "--scale", "laptop", "--launcher", "local", "--set", settings)
        done = gpipe(folder, *run, group=group)
        name = "memory.max_usage_in_bytes" if (group / "memory.max_usage_in_bytes").exists() else "memory.peak"
        peak = int((group / name).read_text())
    print(f"{pipeline}: needs {needed / GIB:.2f} GiB, limit {limit / GIB:.2f}, at most in use {peak / GIB:.2f}")
    assert done.returncode == 0, done.stdout + done.stderr
