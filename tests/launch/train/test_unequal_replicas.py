"""A run whose replicas have different numbers of micro-batches: the same micro-batches as with equal replicas."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from launch.diff.replay import ReplayedAction, replay
from launch.terminal import Terminal
from launch.train import session
from suite import TrainSpec
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ReplicaShare
from suite.pipeline.schedule.remat import UNLIMITED
from suite.training.fingerprints import RunFingerprints
from suite.training.trace import read_traces
from tests.launch.command_line import gpipe_here, losses, refusal
from tests.launch.diff.test_replay import trained

SHAPES = ((6, 5), (5, 7), (7, 6))
"""Inputs and outputs of the linear layers."""


def drops():
    torch.manual_seed(3)
    x = torch.randn(24, 6)
    first, *others = [nn.Linear(*shape) for shape in SHAPES]
    return TrainSpec(
        layers=[first, *(layer for each in others for layer in (nn.Dropout(0.5), each))], loss=nn.MSELoss(),
        train=list(zip(x, x, strict=True)), batch_size=12, steps=3, stages=2, micro_batches=3, replicas=2,
        settings="pipeline.schedule=fill_drain pipeline.remat=never trace=true",
    )  # fmt: skip


SHARES = (ReplicaShare("slow", 1, (UNLIMITED,)), ReplicaShare("fast", 5, (1,)))
"""The fast replica recomputes, the slow one does not."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run with equal replicas, and with ``SHARES``."""
    name, settings = f"{__file__}:drops", "train.fingerprint_steps=3 train.checkpoint_every=1"
    equal = trained(tmp_path_factory.mktemp("equal"), name, settings)
    plan = session.plan_workload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "plan_workload", lambda *given: replace(plan(*given), shares=SHARES))
        patch.setattr(session.PlanReport, "rank_devices", ())  # the devices of this machine will do
        return equal, trained(tmp_path_factory.mktemp("unequal"), name, settings)


def test_each_replica_runs_its_own_micro_batches_with_its_own_recomputes(runs):
    _, run = runs
    assert json.loads((run / "plan.json").read_text())["shares"][1] == {
        "device": "fast", "micro_batches": 5, "max_live_graphs": [1],
    }  # fmt: skip
    for trace in read_traces(run / "traces"):
        kinds = [span.kind for row in trace.timeline.rows for span in row]
        counts = {kind: kinds.count(kind) for kind in "FRB"}
        assert counts == ({"F": 2, "R": 0, "B": 2} if trace.replica == 0 else {"F": 10, "R": 8, "B": 10})


def test_all_micro_batches_of_the_first_step_have_the_same_bits(runs):
    equal, unequal = (RunFingerprints.read(run / "fingerprints").tensors for run in runs)
    keys = [key for key in equal if key[0] == 1 and key[1] is not None]
    assert {key[1] for key in keys} == set(range(6))
    assert len(keys) > 100
    assert all(unequal[key].digest == equal[key].digest for key in keys)


def test_gradients_of_each_parameter_and_losses_differ_by_the_order_of_their_sums_alone(runs):
    equal, unequal = (RunFingerprints.read(run / "fingerprints").tensors for run in runs)
    gradients = [key for key in equal if key[1] is None and key[3].startswith("whole gradient of ")]
    assert {key[0] for key in gradients} == {1, 2, 3}
    for key in gradients:
        assert unequal[key].distance(equal[key]) <= 1e-6 * equal[key].norm
    np.testing.assert_allclose(losses(runs[1]), losses(runs[0]), rtol=1e-6)


def test_recomputes_count_in_hfu_where_a_replica_has_them(runs):
    """The fast replica, with five of six micro-batches, recomputes four of five forwards of each stage. A backward
    takes as many operations for the gradient of the inputs, which the first layer lacks, as for that of the weights."""
    equal, unequal = (json.loads((run / "plan.json").read_text())["flops"] for run in runs)
    first, *others = [inputs * outputs for inputs, outputs in SHAPES]
    forward = sum((first, *others)) / (2 * first + 3 * sum(others))
    model = equal["model_per_unit"]
    assert equal["hardware_per_unit"] == model
    assert unequal["hardware_per_unit"] == pytest.approx(model * (1 + 4 / 6 * forward), rel=1e-6)


def test_a_resume_with_equal_replicas_says_that_sums_change_and_a_repeat_is_refused(runs, tmp_path):
    again = tmp_path / "runs" / runs[1].name
    shutil.copytree(runs[1], again)
    assert "so its bits cannot be repeated on this machine" in refusal("diff", "--run", str(again), folder=tmp_path)
    printed = gpipe_here(tmp_path, "resume", str(again), "--launcher", "local", "--set", "train.steps=4")
    assert "replicas have other micro-batches than before, so gradients are summed in another order" in printed


@pytest.mark.parametrize(("action", "replica", "micro_batch"), [("F0", 0, 0), ("F4", 1, 5), ("R3", 1, 4), ("B4", 1, 5)])
def test_a_replayed_action_is_that_of_the_replicas_own_micro_batch(runs, capsys, action, replica, micro_batch):
    asked = ReplayedAction(3, replica, 1, Action.parse(action))
    assert replay(str(runs[1]), asked, None, None, Terminal())
    assert f": micro-batch {micro_batch} " in capsys.readouterr().out.splitlines()[0]
