"""NaN in an activation, a gradient, a loss, at each layer of K = 3: no stage updates, and where it began is named."""

import numpy as np
import pytest

from suite.errors import NonFiniteError
from suite.training.metrics import read_steps
from tests.suite.training.test_training import trained

LAYERS, STAGES = 6, 3


@pytest.mark.parametrize(
    ("kind", "layer", "what"),
    [
        *(("activation", layer, "output 0") for layer in range(LAYERS - 1)),
        *(("gradient", layer, "gradient of input 0") for layer in range(1, LAYERS)),
        *(("weights", layer, "gradient of") for layer in range(LAYERS)),
        ("activation", LAYERS - 1, "output 0"),
    ],
)
def test_nan_is_named_by_stage_layer_and_micro_batch(kind, layer, what):
    micro_batch = layer % 4
    with pytest.raises(NonFiniteError) as stopped:
        trained(STAGES, until=20, poison=(kind, layer, micro_batch))
    message = str(stopped.value)
    assert "3 steps in a row had non-finite numbers, 2 are allowed; stopped at step 3 without an update" in message
    assert f"at replica 0, stage {layer * STAGES // LAYERS}, micro-batch {micro_batch}, layer {layer}: " in message
    assert what in message


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_left_out_leave_all_weights_as_they_were(replicas):
    """Bad steps 2 and 3, then the stop of the range: what follows is what would follow had there been no such steps."""
    losses, weights = trained(STAGES, replicas=replicas, until=4, spoil=(2, 3))
    before, unspoiled = trained(STAGES, replicas=replicas, until=2)
    assert losses[:2] == before
    assert all(np.isfinite(value).all() for value in weights.values())
    for key in weights:
        assert np.array_equal(weights[key], unspoiled[key]), key


def test_a_spoiled_loss_of_a_whole_run_is_left_out_and_told(trials, monkeypatch):
    """Through settings, launcher and supervisor: one attempt, one step without an update, finite weights."""
    plan = {"fault": "nan", "step": 3, "action": "F2"}
    trial = trials.train(monkeypatch, "train.steps=6 train.checkpoint_every=3", [plan])
    assert trial.error is None, trial.said
    assert "step 4 had non-finite numbers and was skipped" in trial.said
    assert "none, the loss alone" in trial.said
    assert [line["train/applied"] for line in read_steps(trial.run.metrics)] == [1, 1, 1, 0, 1, 1]
    assert all(np.isfinite(value).all() for value in trial.state.values())
