"""A token at a time gives what the whole forward gives, at every position, whatever the beam does with the rows."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from models import language_model, transformer
from models.transformer import TransformerShape
from suite.decoding.decode import Decoder
from suite.decoding.forced import ForcedDecoding
from suite.decoding.kv_cache import BeamUpdate, CachedLayers, first_cached_layer
from suite.errors import SettingError
from suite.pipeline.model.topology import RankCoord
from tests.models.test_transformer import run

CPU = torch.device("cpu")


NUMBERS = {"width": 16, "feed_forward": 24, "heads": 2, "vocabulary": 40, "dropout": 0.3}
TRANSLATION = TransformerShape(2, head_width=8, **NUMBERS)
TEXT = language_model.LanguageModelShape(3, context_length=8, **NUMBERS)


def made(seed, shape=TRANSLATION):
    torch.manual_seed(seed)
    model = (language_model if shape is TEXT else transformer).layers(shape)
    for layer in model:
        for parameter in layer.parameters():  # or biases and norms would be as they begin, and untested
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def whole(model, *inputs):
    return run([layer.eval() for layer in model], *inputs)


def padded(draw, rows, width):
    ids = torch.randint(4, 40, (rows, width), generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    for row in range(rows):
        ids[row, draw(st.integers(1, width)) :] = 0
    return ids


def test_all_layers_from_the_target_on_extend():
    model = made(0)
    assert first_cached_layer(model) == 3
    assert [hasattr(layer, "decode_step") for layer in model] == [False] * 3 + [True] * 4
    assert first_cached_layer(made(0, TEXT)) == 0
    with pytest.raises(SettingError, match="Linear cannot generate text"):
        first_cached_layer([*model, torch.nn.Linear(1, 1)])


@pytest.mark.parametrize("shape", [TRANSLATION, TEXT], ids=["translation", "language model"])
@settings(max_examples=12)
@given(st.data())
def test_each_position_is_that_of_the_whole_forward(shape, data):
    rows, width, first, more = (data.draw(st.integers(1, most)) for most in (4, 6, 4, 4))
    model = [layer.double() for layer in made(data.draw(st.integers(0, 99)), shape)]
    source = [padded(data.draw, rows, width)] if shape is TRANSLATION else []
    target = torch.randint(4, 40, (rows, first + more))
    expected = whole(model, *source, target)
    part = CachedLayers(model, 0, first_cached_layer(model), CPU, mixed=False)
    (logits,), caches = part.prefill((*source, target[:, :first]))
    torch.testing.assert_close(logits, expected[:, first - 1])
    for at in range(first, first + more):
        (logits,) = part.decode_step(caches, (target[:, at : at + 1],))
        torch.testing.assert_close(logits, expected[:, at])


@settings(max_examples=12)
@given(st.data())
def test_moved_rows_are_those_of_the_whole_forward(data):
    """Sentences leave, hypotheses change places and fork: each row's logits are those of its own tokens."""
    sentences, width, beam = (data.draw(st.integers(1, most)) for most in (4, 5, 3))
    model, source = made(data.draw(st.integers(0, 99))), padded(data.draw, sentences, width)
    part, words = CachedLayers(model, 0, first_cached_layer(model), CPU, mixed=False), st.integers(4, 39)
    _, caches = part.prefill((source, torch.full((sentences, 1), 2)))
    left, texts, hypotheses = list(range(sentences)), [[[2]] for _ in range(sentences)], 1
    while left and len(texts[0][0]) < 5:
        kept = data.draw(st.lists(st.sampled_from(range(len(left))), min_size=1, unique=True).map(sorted))
        parents = [[data.draw(st.integers(0, hypotheses - 1)) for _ in range(beam)] for _ in kept]
        tokens = [[data.draw(words) for _ in range(beam)] for _ in kept]
        texts = [
            [[*texts[at][parent], token] for parent, token in zip(*row, strict=True)]
            for at, row in zip(kept, zip(parents, tokens, strict=True), strict=True)
        ]
        move = BeamUpdate(torch.tensor(kept), torch.tensor(parents), torch.tensor(tokens))
        move.apply(caches, len(left), hypotheses, torch.device("cpu"))
        left, hypotheses = [left[at] for at in kept], beam
        (logits,) = part.decode_step(caches, (move.tokens.view(-1, 1),))
        flat = torch.tensor([text for rows in texts for text in rows])
        expected = whole(model, source[left].repeat_interleave(beam, 0), flat)[:, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_mixed_precision_is_that_of_training():
    model, source, target = made(5), torch.randint(4, 40, (3, 4)), torch.randint(4, 40, (3, 4))
    part = CachedLayers(model, 0, first_cached_layer(model), CPU, mixed=True)
    (logits,), caches = part.prefill((source, target[:, :1]))
    assert logits.dtype == torch.bfloat16
    for at in range(1, 4):
        (logits,) = part.decode_step(caches, (target[:, at : at + 1],))
    expected = whole(model, source, target)[:, -1]
    assert 0 < (logits.float() - expected).abs().max() < 0.15


class ConversionCounter(TorchDispatchMode):
    """Counts the conversions to bf16 of each tensor, by its address."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype) and result.dtype == torch.bfloat16:
            self.count[args[0].data_ptr()] += 1
        return result


def test_decoding_in_mixed_precision_casts_each_weight_once():
    model, source = made(5), torch.randint(4, 40, (3, 4))
    part = CachedLayers(model, 0, first_cached_layer(model), CPU, mixed=True)
    decoder = Decoder(RankCoord(0, 1, 1), part, 0, None, CPU)
    with ConversionCounter() as counter:
        decoder.run([source, source], 2, lambda number: ForcedDecoding([[5, 6, 7, 8]] * 3), lambda number: None)
    weights = [p for layer in model for p in layer.parameters() if p.ndim == 2 and counter.count[p.data_ptr()]]
    assert len(weights) > 10
    assert {counter.count[weight.data_ptr()] for weight in weights} == {1}
