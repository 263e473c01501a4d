"""The fused LayerNorm: torch's to the bit where nothing is compiled, and the same operators where it is."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.fused_norm import LayerNorm
from models.loss import TranslationLoss
from models.shape import TransformerShape
from models.transformer import layers
from suite.device import fused_by
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.schedule.config import ScheduleConfig
from tests.micro_batches import split
from tests.suite.pipeline.build import alone, differences


def as_one_kernel(function, *args, **constants):
    """Computes what a compiled function would."""
    return function(*args, **constants)


def norm_and_inputs(dtype: torch.dtype) -> tuple[LayerNorm, list[Tensor]]:
    torch.manual_seed(3)
    norm = LayerNorm(6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm, [torch.randn(2, 5, 6, dtype=dtype, requires_grad=True) for _ in range(3)]


def cuda_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm under autocast on CUDA devices, and the cast of the product behind it."""
    return F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def test_without_a_compiler_it_is_torchs_norm_to_the_bit() -> None:
    norm, (x, branch, _) = norm_and_inputs(torch.float32)
    plain = nn.LayerNorm(6)
    plain.load_state_dict(norm.state_dict())
    total, normed = norm.of_sum(x, branch)
    assert torch.equal(total, x + branch)
    assert torch.equal(normed, plain(x + branch))
    assert torch.equal(norm(x), plain(x))


def test_its_gradients_are_those_of_finite_differences() -> None:
    norm, inputs = norm_and_inputs(torch.float64)
    with fused_by(as_one_kernel):
        own = *inputs, *norm.parameters()
        assert torch.autograd.gradcheck(lambda x, branch, other, *_: (*norm.of_sum(x, branch), norm(other)), own)


def test_in_bf16_values_and_gradients_round_as_eager_ones_on_a_gpu() -> None:
    norm, (x, branch, other) = norm_and_inputs(torch.bfloat16)
    gradients = torch.randn(3, 2, 5, 6, dtype=torch.bfloat16).unbind()
    found = []
    for is_fused in (True, False):
        with torch.autocast("cpu", torch.bfloat16), fused_by(as_one_kernel) if is_fused else nullcontext():
            if is_fused:
                outputs = *norm.of_sum(x, branch), norm(other)
            else:
                outputs = (total := x + branch), cuda_norm(norm, total), cuda_norm(norm, other)
        leaves = x, branch, other, norm.weight, norm.bias
        found.append((*outputs, *torch.autograd.grad(outputs, leaves, gradients)))
    for own, expected in zip(*found, strict=True):
        assert own.dtype == expected.dtype
        assert torch.equal(own, expected)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zero_bubble"])
def test_gradients_of_a_model_with_fused_norms_are_those_of_the_plain_one(schedule: str) -> None:
    torch.manual_seed(5)
    shape = TransformerShape(2, 16, 24, 1, 50, head_width=8, dropout=0.1)
    with torch.device("meta"):
        model = [layer.double() for layer in layers(shape)]
    ids = torch.randint(4, 50, (4, 6))
    batch = ReplicaBatch(split([ids, ids], 2), split([ids], 2), float(ids.numel()), 0)
    fused, plain = (alone(model, TranslationLoss(0.1), ScheduleConfig(schedule, (1,))) for _ in range(2))
    with fused_by(as_one_kernel):
        fused.train(batch, 0)
    plain.train(batch, 0)
    expected = {key: parameter.grad for key, parameter in plain.stage.named_parameters().items()}
    assert max(differences(fused.stage.named_parameters(), expected).values()) < 1e-12


def test_shapes_are_inferred_as_without_kernels() -> None:
    with torch.device("meta"), fused_by(as_one_kernel):
        assert LayerNorm(8)(torch.empty(2, 3, 8)).shape == (2, 3, 8)
