"""The draws of a step are a pure function of (seed, step), in the proportions of temperature sampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.data.text.sampling import Draws, PairSampler, temperature_weights
from suite.errors import DataError

SIZES = [900, 0, 40, 3000, 120]
WHOLE = st.integers(0, 2**63)


def draws(seed: int, step: int, count: int = 300) -> Draws:
    return PairSampler(SIZES, 5.0, seed).draws(step, count)


def same(a: Draws, b: Draws) -> bool:
    return all(
        map(
            np.array_equal, (a.languages, a.pair_indices, a.from_english), (b.languages, b.pair_indices, b.from_english)
        )
    )


@given(WHOLE, WHOLE)
def test_the_same_step_draws_the_same_pairs(seed: int, step: int):
    assert same(draws(seed, step), draws(seed, step))
    assert same(draws(seed, step)[:100], draws(seed, step, 100))
    assert same(draws(seed, step, 256), draws(seed, step)[:256])


@given(WHOLE, WHOLE, WHOLE, WHOLE)
def test_another_seed_or_step_draws_others(seed: int, step: int, seed2: int, step2: int):
    if (seed, step) != (seed2, step2):
        assert not same(draws(seed, step), draws(seed2, step2))


def test_draws_are_made_in_blocks_of_256():
    sampler, random = PairSampler(SIZES, 5.0, 9), np.random.Generator(np.random.Philox(key=np.array([9, 4], "uint64")))
    bounds, starts = np.cumsum(sampler.weights), np.cumsum(SIZES) - SIZES
    expected = []
    for _ in range(3):
        for language, row, direction in random.random((3, 256)).T:
            chosen = int(np.searchsorted(bounds, language, side="right"))
            expected.append((chosen, starts[chosen] + int(row * SIZES[chosen]), direction < 0.5))
    found = sampler.draws(4, 700)
    assert list(zip(found.languages, found.pair_indices, found.from_english, strict=True)) == expected[:700]


def test_languages_and_directions_come_in_their_proportions():
    count = 50_000
    found = draws(7, 3, count)
    expected = np.array(SIZES, dtype=float) ** 0.2 * (np.array(SIZES) > 0)
    expected *= count / expected.sum()
    seen = np.bincount(found.languages, minlength=len(SIZES))
    assert seen[1] == 0
    present = expected > 0
    chi_square = ((seen - expected)[present] ** 2 / expected[present]).sum()
    assert chi_square < 16.3  # 99.9% of a chi-square with 3 degrees of freedom
    assert abs(found.from_english.sum() - count / 2) < 4 * np.sqrt(count) / 2


SKEWED = [27_723, 12_069, 2001, 1396, 690, 493, 110]
"""Pairs of languages of the default corpus, de to lzh, a few hundred to one."""


@pytest.mark.parametrize("temperature", [1.0, 1.43, 5.0, 100.0])
def test_a_million_draws_have_the_shares_of_their_temperature(temperature: float):
    """Each share is within 1% of D^(1/T) / sum: of itself where it is a twentieth or more, in points below."""
    count = 1_000_000
    sampler = PairSampler(SKEWED, temperature, seed=11)
    seen = np.zeros(len(SKEWED))
    for step in range(10):  # as runs draw: each step its own stream
        seen += np.bincount(sampler.draws(step, count // 10).languages, minlength=len(SKEWED))
    wanted = np.array(SKEWED, dtype=float) ** (1 / temperature)
    wanted /= wanted.sum()
    off = np.abs(seen / count - wanted)
    assert (off <= 0.01 * np.where(wanted >= 0.05, wanted, 1)).all(), off / wanted
    assert (seen > 0).all()


def test_rows_are_drawn_evenly_within_their_language():
    found = draws(1, 1, 100_000)
    rows = found.pair_indices[found.languages == 2]
    assert rows.min() == 900
    assert rows.max() == 939
    seen = np.bincount(rows - 900, minlength=40)
    assert ((seen - len(rows) / 40) ** 2 / (len(rows) / 40)).sum() < 72.1  # 99.9%, 39 degrees of freedom


def test_temperature_one_keeps_the_corpus_and_a_large_one_evens_it():
    assert temperature_weights([30, 10], 1.0) == pytest.approx([0.75, 0.25])
    assert temperature_weights([30, 10], 1e6) == pytest.approx([0.5, 0.5], abs=1e-5)
    assert temperature_weights([30_000, 10], 0.001) == pytest.approx([1, 0])


def test_no_pairs_at_all_is_an_error():
    with pytest.raises(DataError, match="none of 2 languages has a pair to train on"):
        PairSampler([0, 0], 5.0, 0)
