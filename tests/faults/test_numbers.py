"""NaN in an activation, a gradient, a loss, at each layer of K = 3: no stage updates, and where it began is named."""

import numpy as np
import pytest

from suite.errors import NumbersError
from tests.training.test_training import trained

LAYERS, STAGES = 6, 3


@pytest.mark.parametrize(
    ("kind", "layer", "what"),
    [
        *(("activation", layer, "its output") for layer in range(LAYERS - 1)),
        *(("gradient", layer, "its input's gradient") for layer in range(1, LAYERS)),
        *(("weights", layer, "the gradient of") for layer in range(LAYERS)),
        ("activation", LAYERS - 1, "its output"),
    ],
)
def test_nan_is_named_by_stage_layer_and_micro_batch(kind, layer, what):
    micro_batch = layer % 4
    with pytest.raises(NumbersError) as stopped:
        trained(STAGES, until=20, poison=(kind, layer, micro_batch))
    told = str(stopped.value)
    assert "3 steps in a row had non-finite numbers, 2 are allowed; stopped at step 3 without an update" in told
    assert f"at replica 0, stage {layer * STAGES // LAYERS}, micro-batch {micro_batch}, layer {layer}: " in told
    assert what in told


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_left_out_leave_all_weights_as_they_were(replicas):
    """Bad steps 2 and 3, then the stop of the range: what follows is what would follow had there been no such steps."""
    losses, weights = trained(STAGES, replicas=replicas, until=4, spoil=(2, 3))
    before, unspoiled = trained(STAGES, replicas=replicas, until=2)
    assert losses[:2] == before
    assert all(np.isfinite(value).all() for value in weights.values())
    for key in weights:
        assert np.array_equal(weights[key], unspoiled[key]), key
