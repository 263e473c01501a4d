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

_CHRF = CHRF()


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

    def chrf(written: Sequence[str], references: Sequence[str]) -> np.ndarray:
        # [sentences, n-grams written, in the reference and common]; sacreBLEU has public functions for neither
        ngrams = np.array(_CHRF._extract_corpus_statistics(written, [references]))
        return np.array([_CHRF._compute_f_score(sample) for sample in (counts @ ngrams).tolist()])

    gains = [chrf(lines.first, lines.references) - chrf(lines.second, lines.references) for lines in directions]
    return np.asarray(np.mean(gains, axis=0))
