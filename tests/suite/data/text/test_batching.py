"""Mini-batches: what is in the tensors, how they are cut, and that replicas only divide them."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.data.text.tokenizer import END_ID, PAD_ID
from suite.errors import DataError, SettingError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.settings import TextSettings, TrainSettings


def batches(
    data: TextData, settings: TextSettings, replicas: int, micro_batches: int, tokens: int = 1024, **train_settings: int
):
    train = TrainSettings(batch_tokens=tokens, **train_settings)
    return TranslationBatches(data, settings, train, replicas, micro_batches)


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


def test_rows_are_pairs_of_the_training_split_and_of_the_languages_asked_for(data: TextData, settings: TextSettings):
    languages = ("fi", "ga")
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
            assert any((target, tuple(text), language) in pairs for language in languages)
        else:
            assert (tuple(text), target, language_of[wanted]) in pairs
            seen.add(language_of[wanted])
        directions.add(wanted == data.english_id)
    assert directions == {True, False}
    assert seen == set(languages)


@pytest.mark.parametrize(
    ("languages", "said"),
    [(("fi", "gaa"), "gaa.*did you mean ga"), (("en",), "text.languages has en")],
)
def test_a_language_that_is_not_there_is_an_error(data: TextData, settings: TextSettings, languages, said):
    with pytest.raises(SettingError, match=said):
        batches(data, settings.model_copy(update={"languages": languages}), 1, 4)


def share_of_tokens(parts: list[ReplicaBatch]) -> float:
    places = [tensor for part in parts for inputs in part.inputs for tensor in inputs]
    return sum(int((tensor != 0).sum()) for tensor in places) / sum(tensor.numel() for tensor in places)


@pytest.mark.parametrize(("tokens", "share"), [(1024, 0.85), (8192, 0.9)])
def test_little_of_a_mini_batch_is_padding(data: TextData, settings: TextSettings, tokens: int, share: float):
    loader = batches(data, settings, 1, 4, tokens, valid_pairs=500)
    assert share_of_tokens([loader.batch(step, 0) for step in range(8)]) > share
    assert share_of_tokens(loader.held_out()) > 0.6  # few pairs of a language


def test_more_replicas_than_pairs_is_an_error(data: TextData, settings: TextSettings):
    with pytest.raises(SettingError, match=r"pairs for 64 replicas; raise train.batch_tokens, now 16"):
        batches(data, settings, 64, 1, tokens=16).batch(0, 0)


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
