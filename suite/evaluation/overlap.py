"""How much of a test text is in the training text: exact, case-folded and near-duplicate.

    training   Save the file       test   Save the file         exact
                                          save the File         case-folded
                                          Save the file as      near-duplicate: 3 of 4 words are shared, at least 0.6
                                          Open the folder       none: 1 of 5 words is shared

Two texts are near-duplicates if the Jaccard index of their sets of words, in lower case, is 0.6 or more. In scripts
without spaces a phrase is one word: for them this finds little more than case-folded copies.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from fractions import Fraction

import numpy as np

from suite.data.text.splitting import TEST, TRAIN
from suite.data.text.text import TextData

NEAR = Fraction(3, 5)
"""Jaccard index of near-duplicates."""

_READ = 50_000
"""Training pairs that are read at a time."""

_REMEMBERED = 1_000_000
"""Texts that are remembered, so that a repetition is not compared again; more would fill the memory."""

_WORD = re.compile(r"[^\W_]+")


class Overlap(IntEnum):
    """The closest that a text has to a training text; larger is closer."""

    NONE = 0
    NEAR = 1
    CASE_FOLDED = 2
    EXACT = 3


def pair_overlaps(data: TextData, rows: Mapping[str, Sequence[int]]) -> dict[str, list[Overlap]]:
    """Returns the overlap of test pairs with the training pairs of all languages, by language. ``rows`` are rows of the
    test split.

    A pair's overlap is the closer one of its two sides: its English with all English training texts, its translation
    with those of its language. About 20 seconds for a million training pairs.
    """
    pairs = {language: data.token_ids(TEST, places) for language, places in rows.items()}
    decode = data.tokenizer.batch_decode
    english = closest_overlaps(
        decode([ids for found in pairs.values() for ids, _ in found]), _training_texts(data, "english")
    )
    overlaps, start = {}, 0
    for language, found in pairs.items():
        own = closest_overlaps(decode([ids for _, ids in found]), _training_texts(data, "translation", language))
        overlaps[language] = [max(both) for both in zip(english[start : start + len(found)], own, strict=True)]
        start += len(found)
    return overlaps


def _training_texts(data: TextData, side: str, language: str | None = None) -> Iterator[str]:
    """Yields the training texts of a side, decoded from their tokens as test texts are; most repetitions once."""
    rows = data.splits[TRAIN].with_format("arrow", columns=[side])
    if language is not None:
        at = data.languages.index(language)
        start = sum(data.sizes[TRAIN][:at])
        rows = rows.select(range(start, start + data.sizes[TRAIN][at]))
    seen: set[bytes] = set()
    for table in rows.iter(batch_size=_READ):
        column = table[side].combine_chunks()
        ids = column.flatten().to_numpy().astype(np.int32)
        ends = np.cumsum(column.value_lengths().to_numpy())
        new = {part.tobytes() for part in np.split(ids, ends[:-1])} - seen
        if len(seen) < _REMEMBERED:
            seen |= new
        yield from data.tokenizer.batch_decode([np.frombuffer(part, np.int32).tolist() for part in new])


def closest_overlaps(texts: Sequence[str], training: Iterable[str]) -> list[Overlap]:
    """Returns the closest overlap of each text with any training text, which it reads one at a time.

    Near-duplicates share a word among the first ``len(x) - ceil(0.6 len(x)) + 1`` of each set x, in any fixed order of
    words (the prefix filter of Chaudhuri et al., 2006). Only sets that do are compared.
    """
    sets = [_words(text) for text in texts]
    rarity = Counter(word for words in sets for word in words)
    with_first_word: defaultdict[str, list[int]] = defaultdict(list)
    for at, words in enumerate(sets):
        for word in _prefix(words, rarity):
            with_first_word[word].append(at)
    exact: set[str] = set()
    folded: set[str] = set()
    near: set[int] = set()
    wanted = {*texts, *(text.casefold() for text in texts)}
    for text in training:
        exact |= {text} & wanted
        folded |= {text.casefold()} & wanted
        words = _words(text)
        for at in {at for word in _prefix(words, rarity) for at in with_first_word.get(word, ())} - near:
            shared = len(words & sets[at])
            if shared >= NEAR * (len(words) + len(sets[at]) - shared):
                near.add(at)
    closest = [Overlap.NEAR if at in near else Overlap.NONE for at in range(len(texts))]
    for at, text in enumerate(texts):
        if text.casefold() in folded:
            closest[at] = Overlap.EXACT if text in exact else Overlap.CASE_FOLDED
    return closest


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.casefold()))


def _prefix(words: frozenset[str], rarity: Counter[str]) -> list[str]:
    """Returns the rarest words of a set: each near-duplicate has one of them."""
    count = len(words) + 1 + (-len(words) * NEAR.numerator // NEAR.denominator) if words else 0
    return sorted(words, key=lambda word: (rarity[word], word))[:count]
