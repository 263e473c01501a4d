"""The head and its loss in chunks of positions, against the whole."""

import pytest
import torch
from torch import nn

from models import chunked_loss
from models.chunked_loss import linear_cross_entropy, rows_at_once
from models.loss import TranslationLoss
from suite.pipeline.planning.memory_tracker import MemoryTracker

WORDS, WIDTH = 13, 6


def example(dtype=torch.float64):
    torch.manual_seed(1)
    project = nn.Linear(WIDTH, WORDS).to(dtype)
    labels = torch.randint(1, WORDS, (3, 5))
    labels[0, 3:] = 0
    return torch.randn(3, 5, WIDTH, dtype=dtype).mul_(4).requires_grad_(), project, labels


def found(y, project, labels, clip):
    objective, measure = linear_cross_entropy(y, project, clip, TranslationLoss(0.1), labels)
    gradients = torch.autograd.grad(objective * 0.5, [y, project.weight, project.bias])
    return objective.detach(), measure, *gradients


@pytest.mark.parametrize("rows", [1, 4, 7, 14])
@pytest.mark.parametrize("clip", [None, 0.8])
def test_chunks_of_any_size_give_the_sums_and_gradients_of_the_whole(rows, clip, monkeypatch):
    y, project, labels = example()
    whole = found(y, project, labels, clip)
    monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 4 * WORDS * rows)
    torch.testing.assert_close(found(y, project, labels, clip), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_a_frozen_projection_gets_no_gradient_and_the_rest_that_of_the_whole(frozen, monkeypatch):
    y, project, labels = example()
    for name in frozen:
        project.get_parameter(name).requires_grad_(False)

    def gradients():
        y.grad = None
        project.zero_grad()
        linear_cross_entropy(y, project, None, TranslationLoss(0.1), labels)[0].backward()
        return [y.grad, project.weight.grad, project.bias.grad]

    whole = gradients()
    monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 4 * WORDS * 4)
    parts = gradients()
    assert [part is None for part in parts[1:]] == [name in frozen for name in ("weight", "bias")]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


def test_there_are_never_more_than_64_chunks_however_large_the_micro_batch():
    assert rows_at_once(64_000, 4096) == chunked_loss.WHOLE_BYTES // 256_000  # 16 of 64 MiB
    assert -(-4_000_000 // rows_at_once(64_000, 4_000_000)) == 64
    assert -(-4_000_001 // rows_at_once(64_000, 4_000_001)) == 64


def test_under_autocast_they_are_those_of_the_whole_to_bf16(monkeypatch):
    y, project, labels = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole = found(y, project, labels, None)
        monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 4 * WORDS * 4)
        parts = found(y, project, labels, None)
    assert [part.dtype for part in parts] == [torch.float32] * 5
    torch.testing.assert_close(parts, whole, rtol=2e-2, atol=2e-2)  # a product of bf16 keeps 8 bits


def test_large_logits_never_stand_whole(monkeypatch):
    """512 positions over 4000 words: 8 MB whole."""
    torch.manual_seed(0)
    project, loss = nn.Linear(8, 4000), TranslationLoss(0.0)
    y, labels = torch.randn(4, 128, 8, requires_grad=True), torch.randint(1, 4000, (4, 128))

    def peak():
        with MemoryTracker(torch.device("cpu")) as memory_tracker:
            linear_cross_entropy(y, project, 30.0, loss, labels)[0].backward()
        return memory_tracker.peak

    whole = peak()
    monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 1 << 20)
    assert whole > 16e6 > 6e6 > peak()
