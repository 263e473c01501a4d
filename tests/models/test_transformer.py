"""T(L, H, A): sizes of the paper, who sees whom, and a start that depth does not spoil."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import masks
from models.blocks import _attend
from models.loss import TranslationLoss
from models.masks import mask, source_to_source, target_to_source, target_to_target
from models.shape import BEGIN, END, PADDING
from models.transformer import Head, TransformerShape, layers
from suite.data.text.tokenizer import BEGIN_ID, END_ID, PAD_ID
from suite.pipeline.model.layers import as_tuple, count_parameters, ties_of

TINY = TransformerShape(
    blocks_per_stack=2, width=16, feed_forward=24, heads=2, vocabulary=40, head_width=8, dropout=0.0
)


def run(model: Iterable[nn.Module], *values: Tensor) -> Tensor:
    for layer in model:
        values = as_tuple(layer(*values))
    (logits,) = values
    return logits


def assert_every_parameter_learns(model: list[nn.Module]) -> None:
    for index, layer in enumerate(model):
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, (index, name)
            assert parameter.grad.isfinite().all(), (index, name)
            assert parameter.grad.abs().max() > 0, (index, name)


def tiny(dtype: torch.dtype = torch.float64, shape: TransformerShape = TINY) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.to(dtype) for layer in layers(shape)]


def ids(rows: int, time: int, vocabulary: int = 40) -> Tensor:
    """Words: no id of padding, and none that separates sentences."""
    return torch.randint(4, vocabulary, (rows, time))


def other(words: Tensor) -> Tensor:
    return 4 + (words - 3) % 36


# Printed sizes of section 5 with two vocabulary matrices of 64000 x 1024, tied ones counted once. By hand, w = 64A:
# 3 attentions 3 * (4*1024*w + 3w + 1024), 2 feed-forwards 2 * (2*1024*H + H + 1024), 5 LayerNorms 5 * 2048, times L;
# 2 last LayerNorms 2 * 2048; 2 * 64000 * 1024 and the softmax's bias 64000.
@pytest.mark.parametrize(
    ("count", "feed_forward", "heads", "printed", "digits"),
    [
        (6, 8192, 16, 408209920, 0),
        (12, 16384, 32, 1239.2e6, 5),
        (64, 16384, 32, 6041.0e6, 5),
    ],
)
def test_sizes_are_the_papers(count: int, feed_forward: int, heads: int, printed: float, digits: int) -> None:
    with torch.device("meta"):
        model = layers(TransformerShape(count, 1024, feed_forward, heads, 64_000))
    assert round(count_parameters(model), -digits) == printed


def test_list_has_the_declared_length_and_ties_the_two_embeddings() -> None:
    model = tiny()
    assert len(model) == TINY.list_length == 7
    assert [index for index, layer in enumerate(model) if ties_of(layer)] == [0, 3]
    assert ties_of(model[0]) == ties_of(model[3]) == {"weight": "embedding"}
    assert model[0].weight.shape == model[3].weight.shape == (40, 16)


def test_ids_that_the_model_reads_are_the_tokenizers() -> None:
    assert (PADDING, BEGIN, END) == (PAD_ID, BEGIN_ID, END_ID)


def test_a_token_does_not_see_the_target_after_it() -> None:
    model, source, target = tiny(), ids(3, 7), ids(3, 6)
    changed = target.clone()
    changed[:, 4] = other(changed[:, 4])
    before, after = run(model, source, target), run(model, source, changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_every_token_of_source_and_target_sees_every_source_token() -> None:
    model, source, target = tiny(), ids(1, 5), ids(1, 4)
    encoded, before = model[1](*model[0](source, target))[0], run(model, source, target)
    for place in range(5):
        changed = source.clone()
        changed[0, place] = other(changed[0, place])
        assert ((model[1](*model[0](changed, target))[0] - encoded).abs().amax(-1) > 1e-9).all()
        assert ((run(model, changed, target) - before).abs().amax(-1) > 1e-9).all()


def test_more_padding_changes_nothing() -> None:
    model, source, target = tiny(), ids(3, 5), ids(3, 4)
    source[1, 3:] = 0
    wide = torch.cat((source, source.new_zeros(3, 4)), dim=1)
    late = torch.cat((target, target.new_zeros(3, 2)), dim=1)
    torch.testing.assert_close(run(model, wide, late)[:, :4], run(model, source, target), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_row_of_padding_is_finite_forward_and_backward(dtype: torch.dtype) -> None:
    model, source, target = tiny(dtype), ids(3, 5), ids(3, 4)
    source[1], target[1] = 0, 0
    logits = run(model, source, target)
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    TranslationLoss(0.1)(logits, target)[0].backward()
    assert_every_parameter_learns(model)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_bf16_is_computed_in_fp32_on_a_cpu(autocast: bool, causal: bool) -> None:
    query, key, value = (torch.randn(2, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    make_mask = None if causal else partial(mask, source_to_source, torch.tensor([[1, 1, 2, 2, 2]] * 2), 5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mixed = _attend(query, key, value, make_mask, causal)
    wide = [tensor.detach().float().requires_grad_() for tensor in (query, key, value)]
    expected = _attend(*wide, make_mask, causal)
    assert torch.equal(mixed, expected.to(torch.bfloat16))
    gradient = torch.randn(10, 16).to(torch.bfloat16)
    mixed.backward(gradient)
    expected.backward(gradient.float())
    for narrow, each in zip((query, key, value), wide, strict=True):
        assert narrow.grad is not None
        assert each.grad is not None
        assert torch.equal(narrow.grad, each.grad.to(torch.bfloat16))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model, source, target = tiny(), ids(3, 5), ids(3, 4)
    source[2] = 0
    together = run(model, source, target)
    for row in range(2):
        alone = run(model, source[row : row + 1], target[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-12)


def test_places_are_numbered_by_sentence_and_padding_of_a_target_counts_to_the_first_source_place() -> None:
    model, source, target = tiny(), ids(3, 5), ids(3, 4)
    source[0, 1], source[0, 4], source[2] = END, 0, 0
    target[0, 0], target[0, 2], target[0, 3:], target[1, 3:] = BEGIN, BEGIN, 0, 0
    x, sentence, _ = model[0](source, target)
    assert sentence.tolist() == [[1, 1, 2, 2, 0], [1] * 5, [0] * 5]
    *_, both = model[3](x, sentence, target)
    assert both.tolist() == [[1, 1, 2, 2, 0, 1, 1, 2, 1], [1] * 9, [0] * 5 + [1] * 4]
    assert sentence.dtype == both.dtype == torch.int32  # they are sent from stage to stage


def test_a_packed_row_gives_each_sentence_what_a_row_of_its_own_gives() -> None:
    torch.manual_seed(1)
    lengths = [(3, 5), (6, 2), (4, 4)]
    pairs = [(ids(1, source), ids(1, target)) for source, target in lengths]
    for source, target in pairs:
        source[0, -1], target[0, 0] = END, BEGIN
    loss = TranslationLoss(0.1)

    def gradients(rows: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        model = tiny()
        outputs = [run(model, *row) for row in rows]
        sum(loss(logits, other(target))[0] for logits, (_, target) in zip(outputs, rows, strict=True)).backward()
        return outputs, [parameter.grad for layer in model for parameter in layer.parameters()]

    packed = tuple(torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
    (together,), gradients_packed = gradients([packed])
    alone, gradients_alone = gradients(pairs)
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=0, atol=1e-12)
    for one, other_one in zip(gradients_packed, gradients_alone, strict=True):
        torch.testing.assert_close(one, other_one, rtol=0, atol=1e-12)


def test_500_random_packings_let_a_place_see_its_sentence_alone() -> None:
    torch.manual_seed(2)
    for _ in range(500):
        sources, targets = torch.randint(1, 6, (2,)).tolist()
        sentence = torch.randint(0, 4, (2, sources + targets))
        places = {"source": range(sources), "target": range(sources, sources + targets)}
        for rule, queries, keys in (
            (source_to_source, "source", "source"),
            (target_to_target, "target", "target"),
            (target_to_source, "target", "source"),
        ):
            found = mask(rule, sentence, sources, torch.float32)
            for row, ids_of_row in enumerate(sentence.tolist()):
                expected = [
                    [
                        0.0
                        if ids_of_row[query] == ids_of_row[key]
                        and (queries != keys or queries == "source" or key <= query)
                        else -math.inf
                        for key in places[keys]
                    ]
                    for query in places[queries]
                ]
                assert found[row, 0].tolist() == expected


def test_layers_share_masks_which_are_freed_with_the_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    def counted(seen: Tensor, dtype: torch.dtype, additive: Callable[..., Tensor] = masks._additive) -> Tensor:
        made.append(weakref.ref(found := additive(seen, dtype)))
        return found

    monkeypatch.setattr(masks, "_additive", counted)
    with torch.no_grad():
        run(tiny(), ids(3, 5), ids(3, 4))
    assert len(made) == 3  # of the source, of the target, and from the target to the source; each stack has two layers
    assert not any(found() is not None for found in made)


def test_a_mask_is_made_again_where_the_last_one_cannot_be_used() -> None:
    layer, x = tiny()[1], torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)
    sentence = torch.tensor([[1, 1, 2, 2]])
    with torch.inference_mode():
        layer(x, sentence, None)
        inferred = sentence.clone()
    assert torch.equal(layer(x, inferred, None)[0], layer(x, sentence, None)[0])
    before = layer(x, sentence, None)[0]
    before.sum().backward()
    sentence[0, 1] = 2
    changed = layer(x, sentence, None)[0]
    assert not torch.allclose(changed, before)
    assert torch.equal(changed, layer(x, sentence.clone(), None)[0])
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask(source_to_source, sentence, 4, torch.float16)
    for sources, dtype in ((4, torch.float16), (4, torch.float32), (3, torch.float32)):
        made = mask(source_to_source, sentence, sources, dtype)
        assert (type(made), made.dtype, made.shape[2]) == (Tensor, dtype, sources)


def test_logits_are_clipped_and_only_beyond_the_bound() -> None:
    head = Head(TransformerShape(1, 16, 24, 2, 40, logit_clip=0.5)).double()
    free = Head(TransformerShape(1, 16, 24, 2, 40, logit_clip=None)).double()
    free.load_state_dict(head.state_dict())
    y = torch.randn(2, 3, 16, dtype=torch.float64)
    bounded, plain = head(y, None, None), free(y, None, None)
    assert 0 < (plain.abs() > 0.5).sum() < plain.numel()
    assert torch.equal(bounded, plain.clamp(-0.5, 0.5))
    bounded.sum().backward()
    assert head.project.bias.grad is not None
    assert torch.equal(head.project.bias.grad, (plain.abs() < 0.5).sum((0, 1)).double())


def test_128_layers_start_calm_and_every_parameter_learns() -> None:
    shape = TransformerShape(blocks_per_stack=64, width=16, feed_forward=32, heads=1, vocabulary=50, head_width=8)
    model, source, target = tiny(torch.float32, shape), ids(4, 6, 50), ids(4, 5, 50)
    logits = run(model, source, target)
    objective, measure = TranslationLoss(0.1)(logits, target)
    assert measure.item() / 20 == pytest.approx(math.log(50), rel=0.25)
    objective.backward()
    assert_every_parameter_learns(model)
