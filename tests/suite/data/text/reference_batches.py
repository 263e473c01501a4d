"""The mini-batches of translation pairs in plain Python lists: what they are, without a thought for speed."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np

from suite.data.text.sampling import PairSampler, temperature_weights
from suite.data.text.splitting import TRAIN, VALID
from suite.data.text.subset import chosen_pairs
from suite.data.text.text import TextData
from suite.data.text.tokenizer import BEGIN_ID, END_ID, PAD_ID
from suite.pipeline.model.microbatch import even_split_sizes
from suite.settings import TextSettings

TOGETHER = 1024
"""Pairs that are packed together."""

Pair = tuple[list[int], list[int]]
"""Source and labels, of one pair or of all pairs in a row."""


def training(data: TextData, text: TextSettings, tokens: int, step: int, parts: int, seed: int = 0):
    """Returns the micro-batches of a whole mini-batch, and its number of labels."""
    pairs = training_pairs(data, text, tokens, step, seed)
    return [_tensors(rows) for rows in _cut(pairs, parts, tokens, text.max_length)], sum(len(own) for _, own in pairs)


def training_pairs(data: TextData, text: TextSettings, tokens: int, step: int, seed: int = 0) -> list[Pair]:
    """Returns the pairs of a mini-batch."""
    sampler = PairSampler(
        data.sizes[TRAIN], text.temperature, seed, data.drawn(text.languages), chosen_pairs(data, text, seed)
    )
    draws, pairs, labels = sampler.draws(step, tokens), [], 0
    for language, row, english in zip(draws.languages, draws.pair_indices, draws.from_english, strict=True):
        pairs.append(_pair(data, TRAIN, int(row), int(language), english))
        labels += len(pairs[-1][1])
        if labels >= tokens:
            break
    return pairs


def held_out(data: TextData, text: TextSettings, tokens: int, pairs: int, micro_batches: int):
    """Returns the micro-batches of each held-out mini-batch, as (language, labels, tensors)."""
    drawn = data.drawn(text.languages)
    weights = temperature_weights([data.sizes[VALID][language] for language in drawn], 5.0)
    entries = []
    for language, weight in zip(drawn, weights, strict=True):
        count, start = data.sizes[VALID][language], sum(data.sizes[VALID][:language])
        order = np.random.default_rng([0, *data.languages[language].encode()]).permutation(2 * count).tolist()
        entries += [((place + 0.5) / weight, language, start + at // 2, at % 2 == 0) for place, at in enumerate(order)]
    entries = sorted(entries, key=lambda entry: entry[:2])[:pairs]
    parts = []
    for language in sorted({entry[1] for entry in entries}):
        own = [_pair(data, VALID, row, code, english) for _, code, row, english in entries if code == language]
        labels = sum(len(pair[1]) for pair in own)
        count = -(-labels // max(1, tokens // micro_batches))
        parts += [(data.languages[language], rows) for rows in _cut(own, count, labels, text.max_length)]
    parts.sort(key=lambda part: _order(part[1][-1]))
    groups, labels = [[]], 0
    for language, rows in parts:
        own = sum(len(row[1]) for row in rows)
        if groups[-1] and labels + own > tokens:
            groups.append([])
            labels = 0
        groups[-1].append((language, float(own), _tensors(rows)))
        labels += own
    return groups


def pack(lengths: list[tuple[int, int]], rows: int) -> list[list[int]]:
    """Returns the pairs of each row: the longest pair first, each to the row that stays the narrowest."""
    order = sorted(range(len(lengths)), key=lambda pair: (-max(lengths[pair]), -sum(lengths[pair]), pair))
    groups = max(1, min(rows, len(order) // TOGETHER))
    packed = []
    for group, count in enumerate(even_split_sizes(min(rows, len(order)), groups)):
        own, filled = [[] for _ in range(count)], [(0, 0)] * count
        for pair in order[group::groups]:
            after = [(source + lengths[pair][0], target + lengths[pair][1]) for source, target in filled]
            row = min(range(count), key=lambda row: max(after[row]))
            own[row].append(pair)
            filled[row] = after[row]
        packed += own
    return packed


def _pair(data: TextData, split: str, row: int, language: int, from_english: bool) -> Pair:
    ((english, translation),) = data.token_ids(split, [row])
    if from_english:
        return [data.language_id(data.languages[language]), *english, END_ID], [*translation, END_ID]
    return [data.english_id, *translation, END_ID], [*english, END_ID]


def _cut(pairs: list[Pair], parts: int, labels: int, max_length: int) -> list[list[Pair]]:
    rows_of_a_part = max(1, round(labels / (parts * max(64, max_length))))
    packed = pack([(len(source), len(target)) for source, target in pairs], parts * rows_of_a_part)
    rows = [tuple(list(chain.from_iterable(pairs[at][side] for at in row)) for side in (0, 1)) for row in packed]
    left = iter(sorted(rows, key=_order))
    return [list(islice(left, size)) for size in reversed(even_split_sizes(len(rows), parts))]


def _order(row: Pair) -> tuple[int, ...]:
    source, target = (-(-len(side) // 8) * 8 for side in row)
    return max(source, target), source + target, len(row[0]), len(row[1])


def _tensors(rows: list[Pair]) -> list[list[list[int]]]:
    """Returns source, target_in and labels."""
    before = [[BEGIN_ID, *(BEGIN_ID if id == END_ID else id for id in labels[:-1])] for _, labels in rows]
    return [_padded(side) for side in ([source for source, _ in rows], before, [labels for _, labels in rows])]


def _padded(rows: list[list[int]]) -> list[list[int]]:
    width = -(-max(map(len, rows)) // 8) * 8
    return [row + [PAD_ID] * (width - len(row)) for row in rows]
