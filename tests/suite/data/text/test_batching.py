"""Mini-batches: what is in the tensors, how they are cut, and that replicas only divide them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from suite.data.text.batching import TranslationBatches
from suite.data.text.prepare import folder_of
from suite.data.text.text import TextData
from suite.errors import SettingError
from suite.pipeline.model.microbatch import MiniBatch
from suite.settings import TextSettings, TrainSettings


def batches(
    data: TextData, settings: TextSettings, replicas: int, micro_batches: int, tokens: int = 1024, seed: int = 0
):
    train = TrainSettings(batch_tokens=tokens, seed=seed)
    return TranslationBatches(data, settings, train, replicas, micro_batches)


def tensors(parts: list[MiniBatch]) -> list[Tensor]:
    pairs = (pair for part in parts for pair in zip(part.inputs, part.targets, strict=True))
    return [tensor for inputs, targets in pairs for tensor in (*inputs, *targets)]


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
        for row, before, after in zip(source.tolist(), target_in.tolist(), labels.tolist(), strict=True):
            row, before, after = ([i for i in ids if i != 0] for ids in (row, before, after))
            assert row[-1] == after[-1] == tokenizer.eos_token_id
            assert before == [tokenizer.bos_token_id, *after[:-1]]
            assert max(len(row), len(after)) <= settings.max_length
            known.add("en" if row[0] == data.english_id else tokens[row[0]])
            assert tokenizer.decode(row[1:-1])
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
    for (source, _), (labels,) in zip(part.inputs, part.targets, strict=True):
        for row, after in zip(source.tolist(), labels.tolist(), strict=True):
            wanted, *text = [i for i in row if i != 0][:-1]
            target = tuple([i for i in after if i != 0][:-1])
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
    loader = batches(data, few, 1, 4)
    parts = [*loader.held_out(60, 4), *(loader.batch(step, 0) for step in range(3))]
    asked = {int(row[0]) for part in parts for source, _ in part.inputs for row in source}
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
        assert {part.weight for part in (*one, *two)} == {float(sum(int((t != 0).sum()) for (t,) in one[0].targets))}


def test_a_mini_batch_depends_on_seed_and_step_alone(data: TextData, settings: TextSettings):
    first = batches(data, settings, 1, 4)
    assert same(tensors([first.batch(5, 0)]), tensors([batches(data, settings, 1, 4).batch(5, 0)]))
    assert not same(tensors([first.batch(5, 0)]), tensors([first.batch(6, 0)]))
    assert not same(tensors([first.batch(5, 0)]), tensors([batches(data, settings, 1, 4, seed=1).batch(5, 0)]))


@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_a_mini_batch_has_the_tokens_asked_for(data: TextData, settings: TextSettings, tokens: int):
    part = batches(data, settings, 1, 4, tokens).batch(0, 0)
    assert tokens <= part.weight < tokens + settings.max_length
    assert len(part) == 4


def examples_of(part: MiniBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        (tuple(i for i in row if i), tuple(i for i in after if i))
        for (source, _), (labels,) in zip(part.inputs, part.targets, strict=True)
        for row, after in zip(source.tolist(), labels.tolist(), strict=True)
    ]


def share_of_tokens(parts: list[MiniBatch]) -> float:
    places = [tensor for part in parts for inputs in part.inputs for tensor in inputs]
    return sum(int((tensor != 0).sum()) for tensor in places) / sum(tensor.numel() for tensor in places)


@pytest.mark.parametrize("tokens", [16, 512])
def test_sorted_steps_divide_the_examples_of_their_steps_by_length(data: TextData, settings: TextSettings, tokens):
    plain = batches(data, settings, 1, 4, tokens)
    pooled = batches(data, settings.model_copy(update={"sorted_steps": 4}), 1, 4, tokens)
    for first in (0, 8):
        steps = range(first, first + 4)
        before, after = ([loader.batch(step, 0) for step in steps] for loader in (plain, pooled))
        found = [sorted(pair for part in parts for pair in examples_of(part)) for parts in (before, after)]
        assert found[0] == found[1]  # no pair is lost, none is seen twice
        mean = sum(part.weight for part in before) / 4
        longest = settings.max_length if tokens > 16 else 2 * settings.max_length
        assert all(abs(part.weight - mean) <= longest for part in after)
        lengths = [max(len(row) for pair in examples_of(part) for row in pair) for part in after]
        assert len(set(lengths)) > 1


def test_sorted_steps_and_narrow_multiples_leave_less_padding(data: TextData, settings: TextSettings):
    less = settings.model_copy(update={"sorted_steps": 16, "pad_to": 2})
    plain, pooled = (
        [loader.batch(step, 0) for step in range(16)]
        for loader in (batches(data, settings, 1, 4, 512), batches(data, less, 1, 4, 512))
    )
    assert share_of_tokens(pooled) > 1.2 * share_of_tokens(plain) > 0.6
    assert {tensor.shape[1] % 2 for part in pooled for inputs in part.inputs for tensor in inputs} == {0}
    assert {tensor.shape[1] % 8 for part in pooled for inputs in part.inputs for tensor in inputs} != {0}


def test_sorted_steps_depend_on_seed_and_step_alone_and_replicas_divide_them(data: TextData, settings: TextSettings):
    pooled = settings.model_copy(update={"sorted_steps": 4})
    one, resumed, halves = batches(data, pooled, 1, 8), batches(data, pooled, 1, 8), batches(data, pooled, 2, 4)
    in_order = [one.batch(step, 0) for step in range(8)]
    for step in (6, 1, 3, 7):  # whatever was asked for before
        assert same(tensors([in_order[step]]), tensors([resumed.batch(step, 0)]))
        assert same(tensors([in_order[step]]), tensors([halves.batch(step, replica) for replica in range(2)]))
    orders = [
        [batches(data, pooled, 1, 8, seed=seed).batch(step, 0).inputs[-1][0].shape[1] for step in range(12)]
        for seed in (0, 1)
    ]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])  # not from short to long


def test_micro_batches_are_even(data: TextData, settings: TextSettings):
    part = batches(data, settings, 1, 8, 4096).batch(2, 0)
    costs = [source.numel() + target.numel() for source, target in part.inputs]
    assert max(costs) < 1.25 * sum(costs) / len(costs)


def test_with_few_pairs_there_are_few_micro_batches(data: TextData, settings: TextSettings):
    loader = batches(data, settings, 2, 64, tokens=80)
    parts = [loader.batch(1, replica) for replica in range(2)]
    rows = sum(len(source) for part in parts for source, _ in part.inputs)
    assert rows == len(parts[0]) + len(parts[1]) < 128
    assert parts[1].offset == len(parts[0]) > 0
    assert len(parts[1]) > 0


def test_more_replicas_than_pairs_is_an_error(data: TextData, settings: TextSettings):
    with pytest.raises(SettingError, match=r"pairs for 64 replicas; raise train.batch_tokens, now 16"):
        batches(data, settings, 64, 1, tokens=16).batch(0, 0)


def test_the_held_out_sample_is_fixed_and_bounded(data: TextData, settings: TextSettings):
    held = batches(data, settings, 1, 4).held_out(200, 4)
    assert same(tensors(held), tensors(batches(data, settings, 2, 8, seed=9).held_out(200, 4)))
    rows = [tuple(row) for part in held for source, _ in part.inputs for row in source.tolist()]
    assert len(rows) == 200
    assert len(held) > 1
    for part in held:
        assert 0 < part.weight <= 1024
        assert part.weight == sum(int((labels != 0).sum()) for (labels,) in part.targets)
        assert [weight for _, weight in part.groups] == [float((labels != 0).sum()) for (labels,) in part.targets]
        assert max(weight for _, weight in part.groups) <= 1.5 * 1024 / 4
    for part in held:
        for (source, _), (language, _) in zip(part.inputs, part.groups, strict=True):
            firsts = set(source[:, 0].tolist())  # the token of the language to write
            assert firsts <= {data.language_id(language), data.english_id}
    assert len({language for part in held for language, _ in part.groups}) > 20
    everything = batches(data, settings, 1, 4, 4096).held_out(10_000, 4)
    assert 1000 < sum(len(source) for part in everything for source, _ in part.inputs) <= 2 * sum(data.sizes["valid"])


def held_out_examples(data: TextData, settings: TextSettings, pairs: int, **changed):
    """Returns the validation examples of each language."""
    parts = batches(data, settings.model_copy(update=changed), 1, 4).held_out(pairs, 4)
    found: dict[str, set] = {}
    for part in parts:
        for at, (language, _) in enumerate(part.groups):
            one = MiniBatch([part.inputs[at]], [part.targets[at]], 1.0)
            found.setdefault(language, set()).update(examples_of(one))
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
