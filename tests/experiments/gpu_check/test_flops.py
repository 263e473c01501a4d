"""Operations by formula compared with counted ones: torch's counter, and the suite's own meter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.gpu_check.flops import Rows, forward_flops, hardware_flops, model_flops
from models.loss import TranslationLoss
from models.transformer import TransformerShape, layers
from suite.pipeline.model.layers import as_tuple
from suite.pipeline.planning.estimate import OpCostMode

SHAPE = TransformerShape(2, 24, 40, 3, 50, head_width=8)
ROWS = Rows(3, 7, 5)


def run(made):
    source, target = torch.randint(1, 50, (3, 7)), torch.randint(1, 50, (3, 5))
    tensors = (source, target)
    for layer in made:
        tensors = as_tuple(layer(*tensors))
    return TranslationLoss(0.1)(*tensors, target)[0]


def test_the_formula_equals_torchs_count_forward_and_backward():
    made = layers(SHAPE)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        objective = run(made)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        objective.backward()
    formula = forward_flops(made, SHAPE, ROWS)
    assert forward.get_total_flops() == formula
    assert forward.get_total_flops() + backward.get_total_flops() == model_flops(formula, 1)


def test_the_meter_counts_the_same_forward():
    made = layers(SHAPE)
    op_cost = OpCostMode(product_rate=1.0, bandwidth=float("inf"))
    with op_cost, torch.no_grad():
        run(made)
    assert op_cost.seconds == forward_flops(made, SHAPE, ROWS)


def test_recomputes_count_only_as_hardware_operations():
    assert model_flops(10.0, 4) == 120
    assert hardware_flops(10.0, 4, recomputed=3) == 150
    assert hardware_flops(10.0, 4, recomputed=0) == model_flops(10.0, 4)


def test_six_operations_per_parameter_and_token_are_most_of_a_deep_model():
    shape = TransformerShape(64, 1024, 16384, 32, 64_000)
    with torch.device("meta"):
        made = layers(shape)
    inside = [layer for layer in made[1:-1] if layer is not made[65]]
    matrices = sum(p.numel() for layer in inside for p in layer.parameters() if p.ndim == 2)
    operations = model_flops(forward_flops(inside, shape, Rows(1, 128, 128)), 1)
    assert operations == pytest.approx(6 * matrices * 128, rel=0.02)
    assert operations > 6 * matrices * 128
