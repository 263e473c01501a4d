"""The ratio of two entrants, and whether its interval covers the truth."""

import numpy as np
import pytest

from tests.bench.ratio import PRECISION, ratio_of


def test_a_ratio_by_hand():
    found = ratio_of([3.0, 4.0, 10.0], [2.0, 4.0, 8.0])
    assert (found.median, found.low, found.high) == (1.25, 1.0, 1.5)
    assert str(found) == "1.250 [1.000, 1.500]"


def test_a_verdict_needs_an_interval_without_1_or_a_narrow_one():
    ones = [1.0] * 6
    assert ratio_of([1.0 + 0.5 * (at % 2) for at in range(6)], ones).verdict == "undecided against"
    narrow = ratio_of([0.99 + 0.02 * (at % 2) for at in range(6)], ones)
    assert (narrow.verdict, str(narrow)) == ("level with", "1.000 [0.990, 1.010]")
    assert ratio_of([1.0 + 2.5 * PRECISION * (at % 2) for at in range(20)], [1.0] * 20).verdict == "undecided against"


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "ahead of"), (0.9, "behind")])
def test_what_slows_a_whole_round_does_not_blur_the_ratio(factor, verdict):
    load = [1.0, 1.4, 0.9, 2.5, 1.1, 1.0]
    found = ratio_of([factor * seconds for seconds in load], load)
    assert found.low == pytest.approx(factor)
    assert found.high == pytest.approx(factor)
    assert found.verdict == verdict


@pytest.mark.parametrize("rounds", [6, 10, 20])
def test_the_interval_covers_the_true_ratio_in_about_95_of_100_contests(rounds):
    draws, covered = np.random.default_rng(0), 0
    for _ in range(300):
        noise = np.exp(0.04 * draws.standard_normal((2, rounds)))
        found = ratio_of(1.05 * noise[0], noise[1])
        covered += found.low <= 1.05 <= found.high
    assert 0.91 <= covered / 300 <= 0.995
