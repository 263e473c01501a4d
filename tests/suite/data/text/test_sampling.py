"""The draws of a step are a pure function of (seed, step), in the proportions of temperature sampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.data.text.sampling import PairSampler, temperature_weights
from suite.errors import DataError

SIZES = [900, 0, 40, 3000, 120]


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


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9), st.floats(0.5, 1e6))
def test_a_language_weighs_its_pairs_to_the_power_of_one_over_the_temperature(sizes: list[int], temperature: float):
    found = temperature_weights([*sizes, 0], temperature)
    assert found.sum() == pytest.approx(1)
    assert found[-1] == 0
    assert np.log(found[:-1] / found[0]) == pytest.approx(np.log(np.array(sizes) / sizes[0]) / temperature, abs=1e-9)
    assert temperature_weights([30_000, 10], 0.001) == pytest.approx([1, 0])  # powers would overflow


def test_no_pairs_at_all_is_an_error():
    with pytest.raises(DataError, match="none of 2 languages has a pair to train on"):
        PairSampler([0, 0], 5.0, 0)
