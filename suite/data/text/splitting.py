"""Splits by English string over all languages at once, so that no held-out string is trained on in another language.

One English string has up to a hundred translations, and catalogues repeat it with other cases, plurals and
placeholders. Strings with the same key form one group, and each group is in one split.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from suite.data.text.cleaning import PLACEHOLDER, Sentences

TRAIN, VALID, TEST = "train", "valid", "test"
SPLITS = (TRAIN, VALID, TEST)

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Share:
    """Size limits of one held-out split."""

    language_share: float  # largest share of a language's pairs
    groups: int  # largest number of groups
    floor: int  # pairs that each language should have, if language_share allows


SHARES = {TEST: Share(0.12, 2000, 50), VALID: Share(0.04, 500, 16)}


def group_key(english: str) -> str:
    """Returns a key that an English string shares with its variants.

    It ignores case, placeholders, punctuation, word order, repeated words and plural endings. Strings without words
    have one key if they have placeholders, and otherwise their own.
    """
    plain = PLACEHOLDER.sub(" ", english)
    words = _WORD.findall(plain.casefold())
    return " ".join(sorted({_singular(word) for word in words})) or ("%" if plain != english else english.casefold())


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ses", "xes", "ches", "shes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def split(sentences: Sentences) -> dict[str, Sentences]:
    """Returns {split: sentences}; each group of English strings is in one split, in all languages.

    The split is deterministic: it depends only on the strings. Groups with more languages are held out more often.
    """
    key_of = {english: group_key(english) for english in {e for pairs in sentences.values() for e, _ in pairs}}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for language, pairs in sentences.items():
        for english, _ in pairs:
            counts[key_of[english]][language] += 1
    sizes = {language: len(pairs) for language, pairs in sentences.items()}
    order = _draw_order(counts)
    split_of: dict[str, str] = {}
    for name, share in SHARES.items():
        split_of |= dict.fromkeys(_held_out([key for key in order if key not in split_of], counts, sizes, share), name)
    parts: dict[str, Sentences] = {name: {language: [] for language in sentences} for name in SPLITS}
    for language, pairs in sentences.items():
        for pair in pairs:
            parts[split_of.get(key_of[pair[0]], TRAIN)][language].append(pair)
    return parts


def _draw_order(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns the keys in the order of a weighted draw without replacement. The weight is the number of languages."""

    def arrival(key: str) -> tuple[float, str]:
        uniform = (int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") + 1) / (2**64 + 1)
        return -math.log(uniform) / len(counts[key]), key

    return sorted(counts, key=arrival)


def _held_out(
    order: Sequence[str], counts: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int], share: Share
) -> set[str]:
    """Returns the keys to hold out: first until every language reaches its floor, then as many as the limits allow."""
    room = {language: math.floor(size * share.language_share) for language, size in sizes.items()}
    short = {language: min(share.floor, cap) for language, cap in room.items()}
    taken: set[str] = set()

    def take(keys: Iterable[str]) -> None:
        for key in keys:
            fits = all(room[language] >= count for language, count in counts[key].items())
            if key in taken or not fits or len(taken) >= share.groups:
                continue
            taken.add(key)
            for language, count in counts[key].items():
                room[language] -= count
                short[language] -= count

    for language in sorted(sizes, key=lambda name: (sizes[name], name)):
        for key in order:
            if short[language] <= 0:
                break
            if language in counts[key]:
                take([key])
    take(order)
    return taken
