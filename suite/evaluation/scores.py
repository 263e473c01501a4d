"""BLEU and chrF by sacreBLEU for each direction, and their macro averages over languages and over thirds of them.

Thirds by the size of a language's text stand for the paper's high- and low-resource languages.

BLEU uses sacreBLEU's default tokenizer 13a for every language. For scripts without spaces between words (Chinese,
Japanese, Thai) it means little; use chrF there, which counts characters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

Third = Literal["high", "middle", "low"]
THIRDS: tuple[Third, ...] = ("high", "middle", "low")

MEASURES = {"nll": "test NLL", "chrf": "chrF", "bleu": "BLEU"}
"""Measures of the test pairs: nats per token of the references, then the scores of the translations."""

FEWEST_PAIRS = 50
"""Fewest test pairs of a reported language; with fewer a score is noise."""


def thirds(sizes: Mapping[str, int]) -> dict[str, Third]:
    """Returns the third of each language, sorted by descending number of training pairs, then by name.

    If three does not divide the number of languages, the first thirds get one more.
    """
    order = sorted(sizes, key=lambda language: (-sizes[language], language))
    parts = np.array_split(np.arange(len(order)), len(THIRDS))
    return {order[at]: third for third, part in zip(THIRDS, parts, strict=True) for at in part}


def one_line(text: str) -> str:
    """Returns a text with single spaces and no line breaks, so that a file has one sentence per line."""
    return " ".join(text.split())


def score(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns the scores of translations, from 0 to 100: {"bleu": ..., "chrf": ...}."""
    metrics = {"bleu": BLEU(), "chrf": CHRF()}
    return {name: metric.corpus_score(translations, [references]).score for name, metric in metrics.items()}


def signatures() -> dict[str, str]:
    """Returns sacreBLEU's signatures: {"bleu": ..., "chrf": ...}."""
    found = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        metric.corpus_score(["a"], [["a"]])  # a signature has the number of references
        found[name] = str(metric.get_signature())
    return found


class TranslatedPair(NamedTuple):
    """A test pair in one direction, and its translation."""

    source: str
    translation: str
    reference: str
    nll: float
    """What the model gives the reference, in nats: the sum over its tokens."""
    tokens: int
    """Of the reference, its end mark included."""


def score_pairs(pairs: Sequence[TranslatedPair]) -> dict[str, Any]:
    """Returns the scores of pairs in one direction: {"pairs", "nll", "bleu", "chrf", "copy": {"bleu", "chrf"}}.

    ``nll`` is the mean per reference token. ``copy`` scores the sources themselves: names and placeholders stay the
    same in a translation, so even a copied source scores well. Without pairs the scores are None.
    """
    if not pairs:
        nothing: dict[str, Any] = {"bleu": None, "chrf": None}
        return {"pairs": 0, "nll": None, **nothing, "copy": nothing}
    sources, written, references, nll, tokens = zip(*pairs, strict=True)
    own, copied = (score(texts, references) for texts in (written, sources))
    return {"pairs": len(pairs), "nll": math.fsum(nll) / sum(tokens), **own, "copy": copied}


def macro_average(
    scores: Mapping[str, Mapping[str, float]], third_of: Mapping[str, Third]
) -> dict[str, dict[str, float | None]]:
    """Returns {"nll": {"all", "high", "middle", "low"}, "chrf": ...}: unweighted means over directions.

    ``scores`` has the ``MEASURES`` of each direction, ``third_of`` its third. The mean of an empty third is None;
    measures that no direction has are left out, such as the NLL of copied sources.
    """
    means: dict[str, dict[str, float | None]] = {}
    for measure in MEASURES:
        values = {direction: each[measure] for direction, each in scores.items() if measure in each}
        if not values:
            continue
        means[measure] = {"all": _mean(list(values.values()))} | {
            third: _mean([value for direction, value in values.items() if third_of[direction] == third])
            for third in THIRDS
        }
    return means


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
