"""BLEU and chrF by sacreBLEU for each direction, and their macro averages over languages and over thirds of them.

Thirds by the size of a language's text stand for the paper's high- and low-resource languages.

BLEU uses sacreBLEU's default tokenizer 13a for every language. For scripts without spaces between words (Chinese,
Japanese, Thai) it means little; use chrF there, which counts characters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
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


@dataclass(frozen=True)
class Scores:
    """Scores of one direction, from 0 to 100."""

    bleu: float
    chrf: float


def thirds(sizes: Mapping[str, int]) -> dict[str, Third]:
    """Returns the third of each language, sorted by descending number of training pairs, then by name.

    If three does not divide the number of languages, the first thirds get one more.
    """
    order = sorted(sizes, key=lambda language: (-sizes[language], language))
    base, extra = divmod(len(order), 3)
    third_of: dict[str, Third] = {}
    for at, third in enumerate(THIRDS):
        start = at * base + min(at, extra)
        third_of |= dict.fromkeys(order[start : start + base + (at < extra)], third)
    return third_of


def one_line(text: str) -> str:
    """Returns a text with single spaces and no line breaks, so that a file has one sentence per line."""
    return " ".join(text.split())


def score(translations: Sequence[str], references: Sequence[str]) -> Scores:
    """Returns the scores of translations."""
    return Scores(*(metric.corpus_score(translations, [references]).score for metric in (BLEU(), CHRF())))


def signatures() -> dict[str, str]:
    """Returns sacreBLEU's signatures: {"bleu": ..., "chrf": ...}."""
    found = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        metric.corpus_score(["a"], [["a"]])  # a signature has the number of references
        found[name] = str(metric.get_signature())
    return found


@dataclass(frozen=True)
class TranslatedPairs:
    """Test pairs in one direction and their translations, in one order."""

    sources: Sequence[str]
    translations: Sequence[str]
    references: Sequence[str]
    nll: Sequence[float]
    """What the model gives each reference, in nats: the sum over its tokens."""
    tokens: Sequence[int]
    """Tokens of each reference, its end mark included."""

    def record(self, parts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Returns the scores of all pairs, and of parts of them: their places by the part's name.

            {"pairs", "nll", "bleu", "chrf", "copy": {"bleu", "chrf"}, "<part>": {"pairs", "nll", ...}}

        ``nll`` is the mean per reference token. ``copy`` scores the sources themselves: names and placeholders stay the
        same in a translation, so even a copied source scores well. Without pairs the scores are None.
        """
        everything = range(len(self.references))
        return {**self._scores(everything), **{name: self._scores(places) for name, places in parts.items()}}

    def _scores(self, places: Sequence[int]) -> dict[str, Any]:
        if not places:
            nothing: dict[str, Any] = {"bleu": None, "chrf": None}
            return {"pairs": 0, "nll": None, **nothing, "copy": nothing}
        sources, written, references = (
            [texts[at] for at in places] for texts in (self.sources, self.translations, self.references)
        )
        nll = math.fsum(self.nll[at] for at in places) / sum(self.tokens[at] for at in places)
        own, copied = (asdict(score(texts, references)) for texts in (written, sources))
        return {"pairs": len(places), "nll": nll, **own, "copy": copied}


class PairedTest(NamedTuple):
    """The chrF difference between two models, and its test."""

    gain: float
    """chrF of the first less that of the second."""
    p_value: float
    """Two-sided."""


@dataclass(frozen=True)
class TwoTranslations:
    """Translations of the same sentences in one direction by two models."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    references: tuple[str, ...]


SAMPLES = 1000
"""Samples of a bootstrap."""


@lru_cache(maxsize=256)  # a sweep's page and its tables in the terminal have the same tests
def paired_bootstrap(texts: tuple[tuple[TwoTranslations, ...], ...]) -> PairedTest:
    """Tests a chrF difference by the paired bootstrap over test pairs (Koehn, 2004), always with the same samples.

    ``texts`` has a tuple for each set of test pairs, such as those of a language, with its directions. The gain is the
    mean over the directions of a text, then over texts. A sample draws the pairs of each text anew, and a pair brings
    all its directions, because these are not independent. p is (1 + c) / (1 + samples) for c samples whose gain differs
    from the samples' mean by at least the measured gain. All directions of a text have the same pairs, at least one.

    The counts of n-grams are sacreBLEU's. Its own test (``significance.PairedTest``) compares absolute
    differences with their mean: one tail of the distribution, so it finds a difference twice as often by chance.
    """
    random = np.random.default_rng(0)
    gains = np.mean([_sampled_gains(directions, random) for directions in texts], axis=0)
    measured, sampled = gains[0], gains[1:]
    as_far = int(np.count_nonzero(np.abs(sampled - sampled.mean()) >= abs(measured)))
    return PairedTest(float(measured), (as_far + 1) / (SAMPLES + 1))


def _sampled_gains(directions: Sequence[TwoTranslations], random: np.random.Generator) -> np.ndarray:
    """Returns the gain of all pairs, then that of each sample: [1 + samples], the mean over directions."""
    pairs = len(directions[0].references)
    drawn = random.multinomial(pairs, np.full(pairs, 1 / pairs), size=SAMPLES)
    counts = np.vstack([np.ones((1, pairs), dtype=drawn.dtype), drawn])
    gains = [
        _chrf_of_samples(counts, lines.first, lines.references)
        - _chrf_of_samples(counts, lines.second, lines.references)
        for lines in directions
    ]
    return np.asarray(np.mean(gains, axis=0))


def _chrf_of_samples(counts: np.ndarray, written: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Returns the chrF of each sample, given how often it has each sentence: [samples, sentences]."""
    # [sentences, orders x (n-grams written, in the reference, common)]; sacreBLEU has no public function for them
    ngrams = np.array(CHRF()._extract_corpus_statistics(written, [references]))
    return chrf_of_counts((counts @ ngrams).reshape(len(counts), -1, 3))


def chrf_of_counts(ngrams: np.ndarray) -> np.ndarray:
    """Returns chrF, 0 to 100, of many texts at once: [texts, orders, (n-grams written, in the reference, common)].

    F-score with beta = 2 of the mean precision and the mean recall over the orders that both sides have, as sacreBLEU
    computes it for one text (Popovic, 2015).
    """
    written, reference, common = np.moveaxis(ngrams, -1, 0)
    present = (written > 0) & (reference > 0)
    orders = np.maximum(present.sum(axis=1), 1)
    precision = np.divide(common, written, out=np.zeros(common.shape), where=present).sum(axis=1) / orders
    recall = np.divide(common, reference, out=np.zeros(common.shape), where=present).sum(axis=1) / orders
    weight = CHRF.BETA**2
    both = weight * precision + recall
    return 100 * np.divide((1 + weight) * precision * recall, both, out=np.zeros(both.shape), where=both > 0)


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
