"""The head and its loss in chunks of positions, against the whole."""

import pytest
import torch
from torch import nn

from models import chunked_loss, language_model, transformer
from models.chunked_loss import CPU_LOGITS_BYTES, ChunkedHead, accelerator_logits_bytes, rows_at_once, set_logits_bytes
from models.loss import TranslationLoss
from suite.pipeline.planning.memory_tracker import tracked_memory
from suite.pipeline.runtime.layer_hooks import watch_tensors

WORDS, WIDTH = 13, 6
SHAPE = transformer.TransformerShape(blocks_per_stack=1, width=8, feed_forward=8, heads=1, vocabulary=WORDS)
LM_SHAPE = language_model.LanguageModelShape(1, width=8, feed_forward=8, heads=1, vocabulary=WORDS, context_length=3)


def example(dtype=torch.float64):
    torch.manual_seed(1)
    project = nn.Linear(WIDTH, WORDS).to(dtype)
    labels = torch.randint(1, WORDS, (3, 5))
    labels[0, 3:] = 0
    return torch.randn(3, 5, WIDTH, dtype=dtype).mul_(4).requires_grad_(), project, labels


def score(y, project, clip, loss, labels, logits_bytes):
    """Returns the objective and the metric of a head that only projects."""
    head = ChunkedHead(SHAPE, nn.Identity(), clip)
    head.project, head.logits_bytes = project, logits_bytes
    return head.gpipe_score(loss, (y,), (labels,))


def found(y, project, labels, clip, logits_bytes=CPU_LOGITS_BYTES):
    objective, measure = score(y, project, clip, TranslationLoss(0.1), labels, logits_bytes)
    gradients = torch.autograd.grad(objective * 0.5, [y, project.weight, project.bias])
    return objective.detach(), measure, *gradients


@pytest.mark.parametrize(("rows", "clip"), [(1, 0.8), (4, None), (14, 0.8)])
def test_chunks_of_any_size_give_the_sums_and_gradients_of_the_whole(rows, clip):
    y, project, labels = example()
    whole = found(y, project, labels, clip)
    parts = found(y, project, labels, clip, 4 * WORDS * rows)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_projection_gets_no_gradient_and_the_rest_that_of_the_whole(frozen):
    y, project, labels = example()
    project.get_parameter(frozen).requires_grad_(False)

    def gradients(logits_bytes):
        y.grad = None
        project.zero_grad()
        score(y, project, None, TranslationLoss(0.1), labels, logits_bytes)[0].backward()
        return [y.grad, project.weight.grad, project.bias.grad]

    whole, parts = gradients(CPU_LOGITS_BYTES), gradients(4 * WORDS * 4)
    assert [part is None for part in parts[1:]] == [name == frozen for name in ("weight", "bias")]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


def test_there_are_never_more_than_64_chunks_however_large_the_micro_batch():
    assert rows_at_once(64_000, 4096) == CPU_LOGITS_BYTES // 256_000  # 16 of 64 MiB
    assert -(-4_000_000 // rows_at_once(64_000, 4_000_000)) == 64
    assert -(-4_000_001 // rows_at_once(64_000, 4_000_001)) == 64


def test_under_autocast_they_are_those_of_the_whole_to_bf16():
    y, project, labels = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole = found(y, project, labels, None)
        parts = found(y, project, labels, None, 4 * WORDS * 4)
    assert [part.dtype for part in parts] == [torch.float32] * 5
    torch.testing.assert_close(parts, whole, rtol=2e-2, atol=2e-2)  # a product of bf16 keeps 8 bits


def test_large_logits_never_stand_whole():
    """512 positions over 4000 words: 8 MB whole."""
    torch.manual_seed(0)
    project, loss = nn.Linear(8, 4000), TranslationLoss(0.0)
    y, labels = torch.randn(4, 128, 8, requires_grad=True), torch.randint(1, 4000, (4, 128))

    def peak(logits_bytes):
        with tracked_memory(torch.device("cpu")) as memory_tracker:
            score(y, project, 30.0, loss, labels, logits_bytes)[0].backward()
        return memory_tracker.peak

    assert peak(CPU_LOGITS_BYTES) > 16e6 > 6e6 > peak(1 << 20)


def test_an_accelerator_computes_larger_logits_at_once_and_a_cpu_does_not():
    positions = 16 * 128  # a micro-batch of t128_6b
    assert positions > rows_at_once(64_000, positions)
    assert positions <= rows_at_once(64_000, positions, accelerator_logits_bytes(79 * 2**30))
    assert accelerator_logits_bytes(2**30) == CPU_LOGITS_BYTES


@pytest.mark.parametrize("logits_bytes", [CPU_LOGITS_BYTES, 4 * WORDS * 2])
def test_a_loss_of_parts_is_watched_as_a_whole(logits_bytes):
    """A number that is not finite there is found whether there are parts or not."""
    head, seen = transformer.Head(SHAPE), []
    set_logits_bytes([head], logits_bytes)
    states, labels = torch.randn(2, 3, 8, requires_grad=True), torch.randint(1, WORDS, (2, 3))
    with watch_tensors({4: head}, loss := TranslationLoss(0.1), lambda *one: seen.append(one)):
        found = head.gpipe_score(loss, (states,), (labels,))
    assert [place.what for place, _ in seen] == ["loss of parts 0", "loss of parts 1"]
    assert all(torch.equal(tensor, own) for (_, tensor), own in zip(seen, found, strict=True))


@pytest.mark.parametrize("head", [transformer.Head(SHAPE), language_model.Head(LM_SHAPE)], ids=["translation", "lm"])
def test_a_head_scores_in_chunks_of_the_size_that_is_set(head, monkeypatch):
    seen = []
    monkeypatch.setattr(chunked_loss, "rows_at_once", lambda *sizes: seen.append(sizes) or sizes[1])
    states, labels = torch.randn(2, 3, 8), torch.randint(1, WORDS, (2, 3))
    head.gpipe_score(TranslationLoss(0.0), (states,), (labels,))
    set_logits_bytes([nn.Linear(1, 1), head], 12_345)
    head.gpipe_score(TranslationLoss(0.0), (states,), (labels,))
    assert seen == [(WORDS, 6, CPU_LOGITS_BYTES), (WORDS, 6, 12_345)]
