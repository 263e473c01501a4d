"""Mini-batches: what is in the tensors, how they are cut, and that replicas only divide them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from suite.data.text.batching import TranslationBatches
from suite.data.text.prepare import folder_of
from suite.data.text.text import TextData
from suite.data.text.tokenizer import END_ID, PAD_ID
from suite.errors import DataError, SettingError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.settings import TextSettings, TrainSettings
from tests.suite.data.text import reference_batches as reference


def batches(
    data: TextData, settings: TextSettings, replicas: int, micro_batches: int, tokens: int = 1024, **train_settings: int
):
    train = TrainSettings(batch_tokens=tokens, **train_settings)
    return TranslationBatches(data, settings, train, replicas, micro_batches)


def tensors(parts: list[ReplicaBatch]) -> list[Tensor]:
    pairs = (pair for part in parts for pair in zip(part.inputs, part.targets, strict=True))
    return [tensor for inputs, targets in pairs for tensor in (*inputs, *targets)]


def sentences(ids: list[int]) -> list[list[int]]:
    """Splits a row at its end marks, and drops the padding."""
    found: list[list[int]] = [[]]
    for one in ids:
        if one != PAD_ID:
            found[-1].append(one)
        if one == END_ID:
            found.append([])
    return found[:-1] if not found[-1] else found


def pairs_of(part: ReplicaBatch) -> list[tuple[list[int], list[int]]]:
    """Returns the source and the labels of each pair of a mini-batch."""
    return [
        pair
        for (source, _), (labels,) in zip(part.inputs, part.targets, strict=True)
        for row, after in zip(source.tolist(), labels.tolist(), strict=True)
        for pair in zip(sentences(row), sentences(after), strict=True)
    ]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_a_micro_batch_says_what_to_translate_into_what(data: TextData, settings: TextSettings):
    part = batches(data, settings, 1, 4).batch(3, 0)
    tokenizer, tokens = data.tokenizer, {data.language_id(language): language for language in data.languages}
    known = set()
    for (source, target_in), (labels,) in zip(part.inputs, part.targets, strict=True):
        assert source.dtype == target_in.dtype == labels.dtype == torch.int64
        assert target_in.shape == labels.shape
        assert source.shape[0] == labels.shape[0]
        assert source.shape[1] % 8 == labels.shape[1] % 8 == 0
        assert 56 <= min(source.shape[1], labels.shape[1]) <= max(source.shape[1], labels.shape[1]) <= 80
        for row, before, after in zip(source.tolist(), target_in.tolist(), labels.tolist(), strict=True):
            of_row = list(zip(sentences(row), sentences(after), strict=True))
            assert [i for i in before if i] == [i for _, to in of_row for i in (tokenizer.bos_token_id, *to[:-1])]
            for text, to in of_row:
                assert text[-1] == to[-1] == tokenizer.eos_token_id
                assert max(len(text), len(to)) <= settings.max_length
                known.add("en" if text[0] == data.english_id else tokens[text[0]])
                assert tokenizer.decode(text[1:-1])
    assert "en" in known
    assert len(known) > 10


@pytest.mark.parametrize("languages", [None, ("fi", "ga")])
def test_rows_are_pairs_of_the_training_split(data: TextData, settings: TextSettings, languages):
    table = data.splits["train"].with_format("arrow")[:]
    rows = zip(
        table["english"].to_pylist(), table["translation"].to_pylist(), table["language"].to_pylist(), strict=True
    )
    pairs = {(tuple(e), tuple(t), data.languages[language]) for e, t, language in rows}
    part = batches(data, settings.model_copy(update={"languages": languages}), 1, 2).batch(0, 0)
    language_of = {data.language_id(language): language for language in data.languages}
    seen, directions = set(), set()
    for source, labels in pairs_of(part):
        wanted, *text = source[:-1]
        target = tuple(labels[:-1])
        if wanted == data.english_id:
            among = languages or data.languages
            assert any((target, tuple(text), language) in pairs for language in among)
        else:
            assert (tuple(text), target, language_of[wanted]) in pairs
            seen.add(language_of[wanted])
        directions.add(wanted == data.english_id)
    assert directions == {True, False}
    assert languages is None or seen == set(languages)


def test_with_some_languages_only_these_are_drawn_and_the_rest_stays(data: TextData, settings: TextSettings):
    few = settings.model_copy(update={"languages": ("fi", "ga")})
    loader = batches(data, few, 1, 4, valid_pairs=60)
    parts = [*loader.held_out(), *(loader.batch(step, 0) for step in range(3))]
    asked = {source[0] for part in parts for source, _ in pairs_of(part)}
    assert asked == {data.english_id, data.language_id("fi"), data.language_id("ga")}
    assert folder_of(few, Path()) == folder_of(settings, Path())  # the same vocabulary, split and test text


@pytest.mark.parametrize(
    ("languages", "said"),
    [(("fi", "gaa"), "gaa.*did you mean ga"), (("en",), "text.languages has en")],
)
def test_a_language_that_is_not_there_is_an_error(data: TextData, settings: TextSettings, languages, said):
    with pytest.raises(SettingError, match=said):
        batches(data, settings.model_copy(update={"languages": languages}), 1, 4)


def test_replicas_divide_a_mini_batch_and_do_not_change_it(data: TextData, settings: TextSettings):
    whole, halves = batches(data, settings, 1, 8), batches(data, settings, 2, 4)
    for step in (0, 1, 17):
        one, two = [whole.batch(step, 0)], [halves.batch(step, replica) for replica in range(2)]
        assert same(tensors(one), tensors(two))
        assert [part.offset for part in two] == [0, 4]
        labels = sum(int((t != 0).sum()) for (t,) in one[0].targets)
        assert {part.divisor for part in (*one, *two)} == {float(labels)}


def test_a_mini_batch_depends_on_seed_and_step_alone(data: TextData, settings: TextSettings):
    first = batches(data, settings, 1, 4)
    assert same(tensors([first.batch(5, 0)]), tensors([batches(data, settings, 1, 4).batch(5, 0)]))
    assert not same(tensors([first.batch(5, 0)]), tensors([first.batch(6, 0)]))
    assert not same(tensors([first.batch(5, 0)]), tensors([batches(data, settings, 1, 4, seed=1).batch(5, 0)]))


@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_a_mini_batch_has_the_tokens_asked_for(data: TextData, settings: TextSettings, tokens: int):
    part = batches(data, settings, 1, 4, tokens).batch(0, 0)
    assert tokens <= part.divisor < tokens + settings.max_length
    assert len(part) == 4


def share_of_tokens(parts: list[ReplicaBatch]) -> float:
    places = [tensor for part in parts for inputs in part.inputs for tensor in inputs]
    return sum(int((tensor != 0).sum()) for tensor in places) / sum(tensor.numel() for tensor in places)


@pytest.mark.parametrize(("tokens", "share"), [(1024, 0.85), (8192, 0.9)])
def test_little_of_a_mini_batch_is_padding(data: TextData, settings: TextSettings, tokens: int, share: float):
    loader = batches(data, settings, 1, 4, tokens, valid_pairs=500)
    assert share_of_tokens([loader.batch(step, 0) for step in range(8)]) > share
    assert share_of_tokens(loader.held_out()) > 0.6  # few pairs of a language


def test_packing_loses_no_pair_and_doubles_none(data: TextData, settings: TextSettings):
    for step in range(4):
        expected = reference.training_pairs(data, settings, 1024, step)
        assert sorted(pairs_of(batches(data, settings, 1, 4).batch(step, 0))) == sorted(expected)


def test_micro_batches_are_even(data: TextData, settings: TextSettings):
    part = batches(data, settings, 1, 8, 4096).batch(2, 0)
    costs = [source.numel() + target.numel() for source, target in part.inputs]
    assert max(costs) < 1.25 * sum(costs) / len(costs)


def test_with_few_pairs_there_are_few_micro_batches(data: TextData, settings: TextSettings):
    loader = batches(data, settings, 2, 64, tokens=80)
    parts = [loader.batch(1, replica) for replica in range(2)]
    pairs = sum(len(pairs_of(part)) for part in parts)
    assert pairs == len(parts[0]) + len(parts[1]) < 128
    assert parts[1].offset == len(parts[0]) > 0
    assert len(parts[1]) > 0


def test_more_replicas_than_pairs_is_an_error(data: TextData, settings: TextSettings):
    with pytest.raises(SettingError, match=r"pairs for 64 replicas; raise train.batch_tokens, now 16"):
        batches(data, settings, 64, 1, tokens=16).batch(0, 0)


def test_the_held_out_sample_is_fixed_and_bounded(data: TextData, settings: TextSettings):
    held = batches(data, settings, 1, 4, valid_pairs=200).held_out()
    assert same(tensors(held), tensors(batches(data, settings, 2, 4, seed=9, valid_pairs=200).held_out()))
    assert sum(len(pairs_of(part)) for part in held) == 200
    assert len(held) > 1
    for part in held:
        assert 0 < part.divisor <= 1024
        assert part.divisor == sum(int((labels != 0).sum()) for (labels,) in part.targets)
        assert [weight for _, weight in part.groups] == [float((labels != 0).sum()) for (labels,) in part.targets]
        assert max(weight for _, weight in part.groups) <= 1.5 * 1024 / 4
    for part in held:
        for at, (language, _) in enumerate(part.groups):
            pairs = pairs_of(ReplicaBatch([part.inputs[at]], [part.targets[at]], 1.0))
            asked = {source[0] for source, _ in pairs}  # the token of the language to write
            assert asked <= {data.language_id(language), data.english_id}
    assert len({language for part in held for language, _ in part.groups}) > 20
    everything = batches(data, settings, 1, 4, 4096, valid_pairs=10_000).held_out()
    assert 1000 < sum(len(pairs_of(part)) for part in everything) <= 2 * sum(data.sizes["valid"])


def held_out_examples(data: TextData, settings: TextSettings, pairs: int, **changed):
    """Returns the validation examples of each language."""
    parts = batches(data, settings.model_copy(update=changed), 1, 4, valid_pairs=pairs).held_out()
    found: dict[str, set] = {}
    for part in parts:
        for at, (language, _) in enumerate(part.groups):
            one = ReplicaBatch([part.inputs[at]], [part.targets[at]], 1.0)
            found.setdefault(language, set()).update((tuple(source), tuple(labels)) for source, labels in pairs_of(one))
    return found


def test_runs_on_other_languages_or_temperatures_validate_on_the_same_pairs(data: TextData, settings: TextSettings):
    three = held_out_examples(data, settings, 30, languages=("de", "fi", "ga"))
    assert three == held_out_examples(data, settings, 30, languages=("de", "fi", "ga"), temperature=1.0)
    alone = held_out_examples(data, settings, 30, languages=("ga",))
    assert three["ga"] < alone["ga"]
    everything = held_out_examples(data, settings, 10_000, languages=("ga",))["ga"]
    most = held_out_examples(data, settings, 10_000, languages=("de", "ga"))["ga"]
    assert alone["ga"] < everything == most
    directions = {source[0] for source, _ in everything}
    assert directions == {data.language_id("ga"), data.english_id}


def test_an_end_mark_within_a_sentence_is_refused(data: TextData, settings: TextSettings, monkeypatch):
    """The model would read two sentences, and no loss would show it."""
    lists = data.id_lists

    def with_end_mark(self, split, rows):
        english, translation = lists(split, rows)
        return pa.array([[*ids[:-1], END_ID] for ids in english.to_pylist()], english.type), translation

    monkeypatch.setattr(TextData, "id_lists", with_end_mark)
    with pytest.raises(DataError, match="a sentence of the prepared text has the token 3, the end mark"):
        batches(data, settings, 1, 4).batch(3, 0)
