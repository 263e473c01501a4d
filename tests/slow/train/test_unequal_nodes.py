"""A run on two nodes with different processors, as far as they say: the plan gives each its stages."""

import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from launch.runs.store import RunFolder
from launch.worker.heartbeat import read_heartbeats
from suite.training.jsonl import read_lines
from suite.training.metrics import read_steps
from tests.faults.injection import VARIABLE, hook
from tests.launch.command_line import command, environment, losses
from tests.slow.storage_sync.test_apart import Apart

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another processor for a node takes root's right to mount")

MODEL = """
import time
from pathlib import Path

import torch
from torch import nn

from suite import TrainSpec

SECONDS = 0.03 if "a slow processor" in Path("/proc/cpuinfo").read_text() else 0.01


class Sleeps(nn.Linear):
    def forward(self, x):
        time.sleep(SECONDS)
        return super().forward(x)


def sleeps():
    torch.manual_seed(3)
    x = torch.randn(64, 6)
    return TrainSpec(
        layers=[Sleeps(6, 6) for _ in range(8)], loss=nn.MSELoss(), train=list(zip(x, x, strict=True)), batch_size=16,
        steps=12, replicas=2, micro_batches=4, settings="pipeline.schedule=1f1b pipeline.remat=never",
    )
"""
SETTINGS = "tracking.wandb=disabled train.threads=1 train.checkpoint_every=3"


@pytest.fixture
def cores():
    return 2


@pytest.fixture
def nodes(tmp_path, cores):
    own = Path("/proc/cpuinfo").read_text().splitlines()
    lines = ["model name : a slow processor" if line.startswith("model name") else line for line in own]
    (tmp_path / "cpuinfo").write_text("\n".join(lines) + "\n")
    made = Apart(f"mount --bind {tmp_path / 'cpuinfo'} /proc/cpuinfo", cores)
    yield made
    made.end()


def experiment(folder, settings, meanwhile=bool, **variables):
    """Trains the model, and calls ``meanwhile`` after the fifth step; returns the run."""
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(
            command("experiment", "model.py:sleeps", "--set", f"{SETTINGS} {settings}"), cwd=folder,
            env=environment() | variables, stdout=printed, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while process.poll() is None and not any(
            len(read_steps(path)) > 4 for path in folder.glob("runs/*/*/metrics.jsonl")
        ):
            time.sleep(0.1)
        meanwhile()
        assert process.wait(300) == 0, (folder / "printed").read_text()
    (run,) = folder.glob("runs/*/*")
    return run


def test_each_kind_of_node_has_the_stages_that_suit_it_with_the_same_losses_also_after_a_death(nodes, tmp_path):
    """Two replicas, each with a stage on each node: the ranks of a node do not follow one another. With two
    micro-batches that is faster than a replica on each node, whose slower one needs at least one of four."""
    kill = hook([{"fault": "kill", "replica": 1, "stage": 0, "step": 7, "action": "B1"}])
    shape = "pipeline.replicas=2 pipeline.micro_batches=2"
    run = experiment(
        tmp_path / "ray", f"pipeline.stages=2 {shape}", RAY_ADDRESS=nodes.cluster.address, **{VARIABLE: kill}
    )
    plan = json.loads((run / "plan.json").read_text())
    devices = [stage["device"] for stage in plan["stages"]]
    # two of eight on an idle machine; how much longer they take on a busy one differs
    assert dict(zip(devices, plan["cells"], strict=True))["a slow processor"] in (1, 2)
    beats = read_heartbeats(RunFolder(run).heartbeats, 2)
    assert len({(beat.replica, beat.stage) for beat in beats}) == 4
    first, second = ({beat.node for beat in beats if beat.stage == stage} for stage in (0, 1))
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)
    ended = [line for line in read_lines(run / "attempts.jsonl") if "outcome" in line]
    assert [line["outcome"] for line in ended] == ["failed", "done"]
    assert (ended[0]["kind"], ended[0]["replica"], ended[0]["stage"]) == ("death", 1, 0)
    assert losses(run) == losses(experiment(tmp_path / "here", f"pipeline.stages=1 {shape}"))


@pytest.mark.parametrize("cores", [1])
def test_a_replica_on_a_slow_node_gets_fewer_micro_batches_also_after_a_death(nodes, tmp_path):
    kill = hook([{"fault": "kill", "replica": 1, "stage": 0, "step": 7, "action": "B0"}])
    run = experiment(tmp_path / "ray", "pipeline.stages=1", RAY_ADDRESS=nodes.cluster.address, **{VARIABLE: kill})
    plan = json.loads((run / "plan.json").read_text())
    shares = {share["device"]: share["micro_batches"] for share in plan["shares"]}
    slow = shares.pop("a slow processor")
    (fast,) = shares.values()
    assert (slow + fast, slow in (1, 2)) == (8, True)  # two on an idle machine
    ended = [line for line in read_lines(run / "attempts.jsonl") if "outcome" in line]
    assert [line["outcome"] for line in ended] == ["failed", "done"]
    equal = experiment(tmp_path / "here", "pipeline.stages=1")
    np.testing.assert_allclose(losses(run), losses(equal), rtol=1e-6)
    node_of = {beat.replica: beat.node for beat in read_heartbeats(RunFolder(run).heartbeats, 2)}
    assert len(set(node_of.values())) == 2
    seconds = [step["throughput/step_s"] for step in read_steps(run / "metrics.jsonl")[2:6]]
    print(f"{statistics.median(seconds):.3f} s a step, planned {plan['step_s']:.3f}; {plan['notes']}")
    assert statistics.median(seconds) < 0.75 * 4 * 8 * 0.03  # with four micro-batches each, the slow one takes this


def test_a_run_that_loses_a_kind_of_node_goes_on_with_the_other(nodes, tmp_path):
    run = experiment(
        tmp_path / "ray", "pipeline.stages=2 train.elastic=true train.steps=60", nodes.lose,
        RAY_ADDRESS=nodes.cluster.address,
    )  # fmt: skip
    ended = [line for line in read_lines(run / "attempts.jsonl") if "outcome" in line]
    assert [line["outcome"] for line in ended] == ["failed", "done"]
    assert ended[0]["kind"] == "node"
    shrunk = json.loads((run / "shrunk.json").read_text())
    assert shrunk["K"] * shrunk["R"] == 2
    assert {stage["device"] for stage in shrunk["stages"]} == {None}
    assert len(losses(run)) == 60
