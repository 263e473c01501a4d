"""Mini-batches of translation pairs equal those of the plain lists in ``reference_batches``, id by id."""

from __future__ import annotations

import pytest

from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.settings import TextSettings, TrainSettings
from tests.suite.data.text import reference_batches as reference

SHAPES = [(1, 1), (1, 4), (2, 3), (3, 8), (8, 1)]


def lists(inputs, targets):
    return [[tensor.tolist() for tensor in (*own, *after)] for own, after in zip(inputs, targets, strict=True)]


@pytest.mark.parametrize(("replicas", "micro_batches"), SHAPES)
@pytest.mark.parametrize("tokens", [200, 1024, 7777])
def test_training_batches(data: TextData, settings: TextSettings, replicas: int, micro_batches: int, tokens: int):
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


@pytest.mark.parametrize("tokens", [16, 40])
def test_tiny_training_batches(data: TextData, settings: TextSettings, tokens: int):
    loader = TranslationBatches(data, settings, TrainSettings(batch_tokens=tokens), 1, 64)
    for step in range(5):
        expected, labels = reference.training(data, settings, tokens, step, 64)
        batch = loader.batch(step, 0)
        assert (len(batch), batch.divisor) == (len(expected), labels)
        assert lists(batch.inputs, batch.targets) == expected


@pytest.mark.slow
def test_many_groups_that_are_packed_side_by_side(data: TextData, settings: TextSettings):
    loader = TranslationBatches(data, settings, TrainSettings(batch_tokens=70_000), 2, 50)
    expected, _ = reference.training(data, settings, 70_000, 6, 100)
    shares = [loader.batch(6, replica) for replica in range(2)]
    assert [part for share in shares for part in lists(share.inputs, share.targets)] == expected


@pytest.mark.parametrize(("languages", "train_pairs"), [(("fi", "ga"), None), (("de", "fi"), ("fi:20",))])
def test_batches_of_some_languages_and_few_pairs(data: TextData, settings: TextSettings, languages, train_pairs):
    few = settings.model_copy(update={"languages": languages, "train_pairs": train_pairs})
    batch = TranslationBatches(data, few, TrainSettings(batch_tokens=999), 1, 4).batch(2, 0)
    expected, labels = reference.training(data, few, 999, 2, 4)
    assert batch.divisor == labels
    assert lists(batch.inputs, batch.targets) == expected


@pytest.mark.parametrize(
    ("pairs", "micro_batches", "tokens"), [(1, 1, 1024), (37, 4, 300), (200, 4, 1024), (10_000, 64, 4096)]
)
def test_held_out_batches(data: TextData, settings: TextSettings, pairs: int, micro_batches: int, tokens: int):
    train = TrainSettings(batch_tokens=tokens, valid_pairs=pairs)
    held = TranslationBatches(data, settings, train, 2, micro_batches).held_out()
    expected = reference.held_out(data, settings, tokens, pairs, micro_batches)
    assert [list(batch.groups) for batch in held] == [[part[:2] for part in group] for group in expected]
    assert [batch.divisor for batch in held] == [sum(part[1] for part in group) for group in expected]
    for batch, group in zip(held, expected, strict=True):
        assert lists(batch.inputs, batch.targets) == [part[2] for part in group]


def test_held_out_batches_of_some_languages(data: TextData, settings: TextSettings):
    few = settings.model_copy(update={"languages": ("ga", "de")})
    (batch,) = TranslationBatches(data, few, TrainSettings(batch_tokens=5000, valid_pairs=60), 1, 2).held_out()
    (group,) = reference.held_out(data, few, 5000, 60, 2)
    assert lists(batch.inputs, batch.targets) == [part[2] for part in group]


@pytest.mark.parametrize("replica", [0, 2])
def test_a_stage_gets_only_what_it_uses(data: TextData, settings: TextSettings, replica: int):
    loader = TranslationBatches(data, settings, TrainSettings(batch_tokens=3000, valid_pairs=50), 3, 5)
    for read in (lambda *which: [loader.batch(7, replica, *which)], lambda *which: loader.held_out(*which)):
        for both, first, last, middle in zip(
            read(True, True), read(True, False), read(False, True), read(False, False), strict=True
        ):
            assert lists(first.inputs, last.targets) == lists(both.inputs, both.targets)
            assert {*first.targets, *last.inputs, *middle.inputs, *middle.targets} == {()}
            for part in (first, last, middle):
                assert (part.divisor, part.offset, part.groups) == (both.divisor, both.offset, both.groups)
