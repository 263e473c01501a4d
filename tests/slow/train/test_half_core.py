"""A node that has half of a core: the planned cut of real layers among all cuts, measured."""

import json
import os
import statistics
import subprocess
from pathlib import Path

import pytest

from suite.training.metrics import read_steps
from tests.control_groups import control_groups
from tests.launch.command_line import command, environment
from tests.slow.storage_sync.test_apart import Apart

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a quota for a node takes root's right to make groups")

MODEL = """
import torch
from torch import nn

from suite import TrainSpec


def wide():
    torch.manual_seed(3)
    x = torch.randn(2048, 1024)
    return TrainSpec(
        layers=[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)], loss=nn.MSELoss(),
        train=list(zip(x, x, strict=True)), batch_size=2048, steps=12, stages=2, micro_batches=16,
        settings="pipeline.schedule=1f1b pipeline.remat=never",
    )
"""
WARM_UPS = 4


@pytest.fixture
def nodes():
    quota = {"cpu.cfs_quota_us": 50_000}, {"cpu.max": "50000 100000"}
    with control_groups({"cpu": quota[0]}, quota[1]) as (group,):
        made = Apart(f"echo $$ > {group}/cgroup.procs")
        yield made
        made.end()


def step_s(folder, nodes, settings=""):
    """Trains the model; returns the median step and the plan."""
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    quiet = "tracking.wandb=disabled train.threads=1 trace=false"
    variables = {"RAY_ADDRESS": nodes.cluster.address, "GPIPE_CACHE": str(folder.parent / "cache")}
    done = subprocess.run(
        command("experiment", "model.py:wide", "--set", f"{quiet} {settings}"), cwd=folder,
        env=environment() | variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = folder.glob("runs/*/*")
    lines = read_steps(run / "metrics.jsonl")[WARM_UPS:]
    return statistics.median(line["throughput/step_s"] for line in lines), json.loads((run / "plan.json").read_text())


def test_the_plan_is_within_5_percent_of_the_best_of_all_cuts_and_far_from_the_equal_cut(nodes, tmp_path):
    chosen_s, plan = step_s(tmp_path / "planned", nodes)
    layers = {stage["device"]: stage["last_layer"] - stage["first_layer"] + 1 for stage in plan["stages"]}
    (half,) = [device for device in layers if device.endswith(", 50% of a core")]
    seconds = {}
    for first in range(1, 6):
        settings = f"pipeline.layers_per_cell={first},{6 - first}"
        seconds[first], _ = step_s(Path(tmp_path, str(first)), nodes, settings)
    best_s, equal_s = min(seconds.values()), seconds[3]
    print(f"half a core has {layers[half]} of 6 layers: {chosen_s:.3f} s, planned {plan['step_s']:.3f}")
    print(f"all cuts: {seconds}")
    assert chosen_s <= 1.05 * best_s
    assert equal_s >= 1.3 * chosen_s
