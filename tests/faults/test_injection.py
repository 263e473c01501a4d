"""The plan of faults: who is meant, what strikes once, what is spoiled. The deadly ones are in tests/slow."""

import json

import pytest
import torch
from torch import nn

from launch.worker.attempt import Attempt
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.boundary import CutSpec, TensorSpec
from suite.pipeline.runtime.skip import SkipLayout
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.worker_status import WorkerStatus
from tests.faults.injection import InjectedError, inject
from tests.suite.pipeline.build import CPU
from tests.suite.pipeline.toy import SumLoss

PLACE = RankCoord(1, 3, 1)


def of(tmp_path, *faults, attempt=1):
    """Returns the status of a worker that these faults strike."""
    status = WorkerStatus()
    inject(json.dumps(faults), PLACE, Attempt(tmp_path, tmp_path, 3, number=attempt), status)
    return status


def stage_of(count, loss=None):
    """A stage of linear layers, from layer 4 on."""
    with torch.device("meta"):
        layers = [nn.Linear(2, 2) for _ in range(4 + count)]
    return Stage(layers, [range(4, 4 + count)], loss, CPU, "fp32", 7)


def test_a_fault_strikes_once_and_only_where_it_is_meant(tmp_path):
    status = of(tmp_path, {"fault": "raise", "step": 3, "action": "F2"})
    for action, step in (("F2", 2), ("F1", 3), ("F2", None)):
        status.begin(action, step)
    recorded = []
    status.on_change = lambda: recorded.append((status.action, status.step))
    with pytest.raises(InjectedError):
        status.begin("F2", 3)
    assert recorded == [("F2", 3)]  # the action is recorded before the fault strikes
    status.begin("F2", 3)


@pytest.mark.parametrize(("fault", "check"), [("nan", torch.isnan), ("inf", torch.isinf)])
def test_a_spoiled_loss_has_the_gradients_of_the_true_one(tmp_path, fault, check):
    status = of(tmp_path, {"fault": fault, "of": "loss", "step": 3})
    stage = status.stage = stage_of(1, SumLoss())
    cut = CutSpec((TensorSpec((1, 1, 2), torch.float32, False),))
    boundary = SkipLayout((), [range(4), range(4, 5)], 1).input_boundary(cut)
    weight, found = stage.by_index[4].weight, []
    for step in (2, 3):
        status.begin("F0", step)
        micro_batch = CellMicroBatch((torch.ones(1, 1, 2),), boundary, None)
        targets = (torch.ones(1, dtype=torch.long),)
        (objective,), metric = stage.forward_with_graph(micro_batch, targets)
        with torch.no_grad():
            (without_graph,), _ = stage.forward(micro_batch, targets)
        assert metric.isfinite()
        assert bool(check(objective)) == bool(check(without_graph)) == (step == 3)
        stage.backward(micro_batch, (torch.ones(()),))
        found.append(weight.grad.clone())
        weight.grad = None
    assert found[0].any()
    assert torch.equal(*found)
