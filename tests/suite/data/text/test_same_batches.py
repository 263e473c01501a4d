"""Mini-batches of translation pairs equal those of the plain lists in ``reference_batches``, id by id."""

from __future__ import annotations

import pytest

from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.settings import TextSettings, TrainSettings
from tests.suite.data.batches import assert_parts
from tests.suite.data.text import reference_batches as reference

FEW = {"languages": ("de", "fi"), "train_pairs": ("fi:20",)}


def lists(inputs, targets):
    return [[tensor.tolist() for tensor in (*own, *after)] for own, after in zip(inputs, targets, strict=True)]


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "tokens", "changes"),
    [(1, 1, 1024, {}), (2, 3, 3333, {}), (3, 8, 200, {}), (1, 64, 16, {}), (1, 4, 999, FEW)],
)
def test_training_batches(data: TextData, settings: TextSettings, replicas, micro_batches, tokens, changes):
    settings = settings.model_copy(update=changes)
    loader = TranslationBatches(data, settings, TrainSettings(batch_tokens=tokens, seed=3), replicas, micro_batches)
    for step in (0, 41):
        expected, labels = reference.training(data, settings, tokens, step, replicas * micro_batches, seed=3)
        offset = 0
        for replica in range(replicas):
            batch = loader.batch(step, replica)
            assert (batch.offset, batch.divisor) == (offset, labels)
            assert lists(batch.inputs, batch.targets) == expected[offset : offset + len(batch)]
            offset += len(batch)
        assert offset == len(expected)


@pytest.mark.parametrize(
    ("pairs", "micro_batches", "tokens", "changes"),
    [(1, 1, 1024, {}), (300, 4, 300, {"temperature": 1.0}), (10_000, 64, 4096, {"languages": ("ga", "de")})],
)
def test_held_out_batches(data: TextData, settings: TextSettings, pairs, micro_batches, tokens, changes):
    """The temperature of training does not matter, and in the order of a language other languages do not."""
    settings = settings.model_copy(update=changes)
    train = TrainSettings(batch_tokens=tokens, valid_pairs=pairs)
    held = TranslationBatches(data, settings, train, 2, micro_batches).held_out()
    expected = reference.held_out(data, settings, tokens, pairs, micro_batches)
    assert [list(batch.groups) for batch in held] == [[part[:2] for part in group] for group in expected]
    assert [batch.divisor for batch in held] == [sum(part[1] for part in group) for group in expected]
    for batch, group in zip(held, expected, strict=True):
        assert lists(batch.inputs, batch.targets) == [part[2] for part in group]


@pytest.mark.parametrize("replica", [0, 2])
def test_a_stage_gets_only_what_it_uses(data: TextData, settings: TextSettings, replica: int):
    loader = TranslationBatches(data, settings, TrainSettings(batch_tokens=3000, valid_pairs=50), 3, 5)
    for read in (lambda *which: [loader.batch(7, replica, *which)], lambda *which: loader.held_out(*which)):
        for parts in zip(read(True, True), read(True, False), read(False, True), read(False, False), strict=True):
            assert_parts(*parts)
