"""The translation loss against torch's cross entropy and numerical gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.loss import TranslationLoss


def example(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(1, 11, (3, 4))
    labels[0, 2:], labels[2] = 0, 0
    return torch.randn(3, 4, 11, dtype=dtype).mul_(3).requires_grad_(), labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_sums_and_gradient_are_those_of_torch(smoothing: float) -> None:
    logits, labels = example()
    objective, measure = TranslationLoss(smoothing)(logits, labels)
    (gradient,) = torch.autograd.grad(objective * 3, logits)
    flat = logits.flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(*flat, label_smoothing=smoothing, ignore_index=0, reduction="sum")
    torch.testing.assert_close(objective, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(measure, F.cross_entropy(*flat, ignore_index=0, reduction="sum"), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected * 3, logits)[0], rtol=0, atol=1e-12)
    assert not measure.requires_grad


def test_gradient_is_the_numerical_one() -> None:
    logits, labels = example()
    assert torch.autograd.gradcheck(lambda values: TranslationLoss(0.1)(values, labels)[0], logits)


def test_micro_batches_add_up() -> None:
    logits, labels = example()
    loss = TranslationLoss(0.1)
    whole = loss(logits, labels)
    parts = [loss(logits[row : row + 1], labels[row : row + 1]) for row in range(3)]
    for index in range(2):
        torch.testing.assert_close(sum(part[index] for part in parts), whole[index], rtol=1e-12, atol=0)
    assert parts[2][0].item() == parts[2][1].item() == 0


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits, labels = example(torch.bfloat16)
    objective, measure = TranslationLoss(0.1)(logits, labels)
    exact, _ = TranslationLoss(0.1)(logits.double(), labels)
    assert objective.dtype == measure.dtype == torch.float32
    assert objective.item() == pytest.approx(exact.item(), rel=1e-6)
    objective.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    objective, _ = TranslationLoss(0.1)(logits, torch.tensor([[1]]))
    objective.backward()
    assert objective.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
