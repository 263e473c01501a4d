"""Inferred shapes and types are those of a run on the device, in bf16 too, for layers of any kind."""

import random
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn

from experiments.custom.batches import SpecBatches
from experiments.custom.layers import on_meta
from experiments.custom.spec_check import layers_of
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.sample import MicroBatch
from suite.pipeline.runtime.boundary import CutSpec, TensorSpec
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import call
from suite.settings import OptimizerSettings
from tests.experiments.custom import models
from tests.suite.pipeline.toy import SquareLoss, Weighted

IMAGES, ROWS = (2, 4, 6, 6), (2, 5, 8)
LAYERS = {
    "convolution with bias": (IMAGES, nn.Conv2d(4, 6, 3)),
    "convolution in one dimension": (ROWS, nn.Conv1d(5, 3, 2)),
    "PReLU": (ROWS, nn.PReLU()),
    "einsum": (ROWS, Weighted(lambda x, w: torch.einsum("btd,bde->bte", x, w), (2, 8, 3))),
    "bmm": (ROWS, Weighted(torch.bmm, (2, 8, 3))),
    "baddbmm": (ROWS, Weighted(lambda x, w: torch.baddbmm(w[:, :1, :1], x, w), (2, 8, 3))),
    "attention to a parameter": (
        (2, 2, 5, 8),
        Weighted(lambda x, w: nn.functional.scaled_dot_product_attention(x, w, w), (2, 2, 3, 8)),
    ),
    "product in fp32": (ROWS, Weighted(lambda x, w: x.float() @ w, (8, 3))),
}


def run(layers, tensors):
    """Returns the cut behind each layer of a run under autocast, as ``Stage`` runs them.

    Without oneDNN, whose LSTM in bf16 needs AVX-512.
    """
    cuts, stash = [], {}
    for layer in layers:
        with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
            tensors = call(layer, tensors, stash, bf16=True)
        cuts.append(tuple(map(TensorSpec.of, tensors)))
    return cuts


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_bf16_has_the_shapes_and_types_of_its_run_and_can_be_estimated(name):
    shape, layer = LAYERS[name]
    layers = [nn.Linear(shape[-1], shape[-1]), layer]
    x = torch.randn(shape)
    inferred = ShapeInference([on_meta(layer) for layer in layers], bf16=True).infer_all(CutSpec.of([x]))
    assert [cut.main for cut in inferred[1:]] == run(layers, (x,))
    data, bf16 = MicroBatch((x,), (torch.zeros(1),)), OptimizerSettings(precision="bf16")
    assert len(estimate([*map(on_meta, layers)], SquareLoss(), data, DEVICES["H100"], bf16)) == 2


@pytest.mark.parametrize("model", models.MODELS, ids=lambda model: model.__name__)
def test_a_model_in_bf16_has_the_shapes_and_types_of_its_run(model):
    spec = model()
    layers = [layer.float() for layer in layers_of(spec)]
    inputs = SpecBatches(spec, models.ROWS, seed=0).batch(0, 0, 1, spec.micro_batches).inputs[0]
    inputs = tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs)
    inferred = ShapeInference([on_meta(layer) for layer in layers], bf16=True).infer_all(CutSpec.of(inputs))
    assert [cut.main for cut in inferred[1:]] == run(layers, inputs)


def test_the_casts_that_other_threads_use_stay():
    """Shapes of a future mini-batch are inferred while the stage trains."""
    casts, linear = [], nn.Linear(8, 8)
    inference = ShapeInference([on_meta(nn.Conv1d(5, 3, 2))], bf16=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                casts.append(linear(torch.randn(2, 8)).grad_fn.next_functions[2][0])
            thread = Thread(target=inference.infer_all, args=(CutSpec.of([torch.randn(ROWS)]),))
            thread.start()
            thread.join()
    assert casts[0].next_functions[0][0] is casts[1].next_functions[0][0]


class Drops(nn.Module):
    """Drops its branch now and then, by Python's or numpy's numbers."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x):
        return x if self.draw() < 0.5 else self.linear(x)


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()], ids=["Python", "numpy"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_layer_that_drops_itself_needs_a_gradient_whatever_was_drawn(draw, bf16):
    x = torch.randn(2, 8)
    for seed in range(8):
        random.seed(seed)
        np.random.seed(seed)
        layers = [on_meta(Drops(draw)), on_meta(nn.Dropout(0.5)), on_meta(nn.Tanh())]
        cuts = ShapeInference(layers, bf16).infer_all(CutSpec.of([x]))
        assert [cut.main[0].needs_gradient for cut in cuts] == [False, True, True, True]
    frozen = on_meta(Drops(draw).requires_grad_(False))
    assert not ShapeInference([frozen], bf16).infer_all(CutSpec.of([x]))[-1].main[0].needs_gradient
