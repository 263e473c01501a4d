"""Transformer-L: sizes of the paper, no look ahead, torch's own layer as a reference, and a calm start at any depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models.language_model import LanguageModelShape, layers
from models.loss import TranslationLoss
from models.shape import TransformerShape
from suite.pipeline.model.layers import count_parameters, materialize, structure_key, ties_of
from tests.models.test_transformer import TINY as TRANSLATION
from tests.models.test_transformer import assert_every_parameter_learns, run, tiny

TINY = LanguageModelShape(blocks_per_stack=3, width=16, feed_forward=24, heads=2, vocabulary=40, context_length=7)
CPU = torch.device("cpu")


def make(shape: LanguageModelShape = TINY) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.double() for layer in layers(shape)]


def text(rows: int, shape: LanguageModelShape = TINY) -> tuple[Tensor, Tensor]:
    """Ids and their labels, the ids one place on, without padding."""
    ids = torch.randint(
        1, shape.vocabulary, (rows, shape.context_length + 1), generator=torch.Generator().manual_seed(1)
    )
    return ids[:, :-1], ids[:, 1:]


# Table 1 of the paper prints 282.2M, 5.3B and 83.9B. By hand, d = 2048 and V = 32000: a layer has
# 4 * (d*d + d) in attention, 2*d*4d + 4d + d in feed-forward and 4d in norms; beside the layers 2*V*d + V.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "parameters"),
    [(3, 282178816), (103, 5318006016), (1663, 83876910336)],
)
def test_sizes_are_the_papers(count: int, parameters: int) -> None:
    with torch.device("meta"):
        model = layers(LanguageModelShape(count))
    assert count_parameters(model) == parameters
    assert parameters == count * (12 * 2048**2 + 13 * 2048) + 2 * 32_000 * 2048 + 32_000


def test_the_list_has_the_declared_length_and_ties_nothing() -> None:
    model = make()
    assert len(model) == TINY.list_length == 5
    assert not any(ties_of(layer) for layer in model)
    assert LanguageModelShape(3).head_width == 64


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_token_sees_itself_and_those_before_it_alone(place: int) -> None:
    model, (ids, _) = make(), text(3)
    changed = ids.clone()
    changed[:, place] = changed[:, place] % 39 + 1
    before, after = run(model, ids), run(model, changed)
    assert torch.equal(before[:, :place], after[:, :place])
    assert ((before[:, place:] - after[:, place:]).abs().amax(-1) > 1e-9).all()


def test_a_block_is_torchs_own_pre_norm_layer() -> None:
    block = make()[1]
    own = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, norm_first=True, batch_first=True, dtype=torch.float64)
    names = {
        "attention_norm": "norm1", "attention.outward": "self_attn.out_proj", "feed_norm": "norm2",
        "feed.inward": "linear1", "feed.outward": "linear2",
    }  # fmt: skip
    state = {"self_attn.in_proj_weight": "attention.inward.weight", "self_attn.in_proj_bias": "attention.inward.bias"}
    state |= {f"{own_name}.{kind}": f"{name}.{kind}" for name, own_name in names.items() for kind in ("weight", "bias")}
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.5)  # biases and norms too, which start at values that hide a mistake
    own.load_state_dict({own_name: block.state_dict()[name] for own_name, name in state.items()})
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(block(x), own(x, src_mask=mask, is_causal=True), rtol=0, atol=1e-12)


def test_an_embedded_token_has_unit_variance_and_a_place() -> None:
    shape = LanguageModelShape(1, width=64, feed_forward=24, heads=2, vocabulary=1000, context_length=7)
    embedding, (ids, _) = make(shape)[0], text(3, shape)
    tokens = 8 * embedding.get_parameter("weight")
    assert tokens.std().item() == pytest.approx(1, rel=0.03)
    places = embedding(ids) - tokens[ids]
    angles = torch.arange(7.0) * 10_000.0 ** (-5 / 31)  # the sixth of 32 rates, 1 to 1/10000
    torch.testing.assert_close(places[:, :, 5], angles.sin().double().expand(3, 7), rtol=0, atol=1e-5)
    torch.testing.assert_close(places[:, :, 32 + 5], angles.cos().double().expand(3, 7), rtol=0, atol=1e-5)


def test_dropout_is_drawn_in_training_only() -> None:
    shape = LanguageModelShape(2, width=16, feed_forward=24, heads=2, vocabulary=40, context_length=7, dropout=0.3)
    model, (ids, _) = make(shape), text(2)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    nn.init.zeros_(model[1].get_parameter("attention.outward.weight"))  # of each block one branch is left
    nn.init.zeros_(model[2].get_parameter("feed.outward.weight"))
    for layer, value in zip(model[:3], (ids, x, x), strict=True):
        assert not torch.equal(layer(value), layer(value))
    for layer in model:
        layer.eval()
    assert torch.equal(run(model, ids), run(model, ids))


def test_the_list_is_made_from_layers_without_memory_and_one_seed_is_one_model() -> None:
    with torch.device("meta"):
        hollow = layers(TINY)
    assert all(parameter.is_meta for layer in hollow for parameter in layer.parameters())
    assert len({structure_key(layer) for layer in hollow[1:-1]}) == 1
    made, again, other = ([materialize(layer, seed, CPU) for layer in hollow] for seed in (7, 7, 8))
    ids, labels = text(4)
    assert run(made, ids).shape == (4, 7, 40)
    assert torch.equal(run(made, ids), run(again, ids))
    assert not torch.equal(run(made, ids), run(other, ids))
    TranslationLoss(label_smoothing=0.0)(run(made, ids), labels)[0].backward()
    assert_every_parameter_learns(made)


@pytest.mark.parametrize("make", [make, tiny], ids=["language model", "translation"])
def test_reset_fills_every_parameter_and_depends_on_the_seed_alone(make: Callable[[], list[nn.Module]]) -> None:
    first, second = make(), make()
    with torch.no_grad():
        for parameter in (parameter for layer in second for parameter in layer.parameters()):
            parameter.fill_(math.nan)
    for model in (first, second):
        for layer in model:
            torch.manual_seed(5)
            layer.reset_parameters()  # type: ignore[operator]
    for one, two in zip(first, second, strict=True):
        for name, parameter in one.named_parameters():
            assert torch.equal(parameter, two.get_parameter(name)), name


@pytest.mark.parametrize("count", [1, 48])
def test_any_depth_starts_near_the_uniform_distribution(count: int) -> None:
    shape = LanguageModelShape(count, width=16, feed_forward=64, heads=2, vocabulary=1000, context_length=12)
    model, (ids, labels) = make(shape), text(8, shape)
    logits = run(model, ids)
    objective, measure = TranslationLoss(label_smoothing=0.0)(logits, labels)
    assert measure.item() / labels.numel() == pytest.approx(math.log(1000), rel=0.03)
    # Glorot's variance 2 / (d + V) for d products with an embedded token, whose square is 1 and its position's 1/2.
    assert logits.std().item() == pytest.approx(math.sqrt(1.5 * 2 * 16 / 1016), rel=0.5)
    objective.backward()
    assert_every_parameter_learns(model)


@pytest.mark.parametrize(
    ("shape", "field", "value", "message"),
    [
        (TINY, "context_length", 0, "context_length\n  Input should be greater than or equal to 1 "),
        (TINY, "width", 15, "width\n  Input should be a multiple of 2 "),
        (TINY, "blocks_per_stack", 0, "blocks_per_stack\n  Input should be greater than or equal to 1 "),
        (TINY, "blocks_per_stack", 1_000_001, "blocks_per_stack\n  Input should be less than or equal to 1000000 "),
        (TINY, "dropout", 1.0, "dropout\n  Input should be less than 1 "),
        (TINY, "heads", 3, "heads must divide the width, 16, evenly, which 3 does not"),
        (TRANSLATION, "logit_clip", 0.0, "logit_clip\n  Input should be greater than 0 "),
        (TRANSLATION, "label_smoothing", -0.1, "label_smoothing\n  Input should be greater than or equal to 0 "),
    ],
)
def test_impossible_shapes_are_refused_by_name(
    shape: LanguageModelShape | TransformerShape, field: str, value: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(shape, **{field: value})
