"""The paired bootstrap: is the chrF difference of two models more than the chance of the test pairs?

test pairs, both directions      1 2 3 4 5 6        gain of all pairs
a sample, 1,000 times            3 1 1 6 4 3        gain of the sample: how far does it scatter?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from sacrebleu.metrics.chrf import CHRF


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

    The counts of n-grams are sacreBLEU's. Its own test (``significance.PairedTest``) compares absolute differences with
    their mean. That is one tail of the distribution, so it finds a difference two to three times as often by chance.
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
