"""The ratio of two entrants, and whether its interval covers the truth."""

import numpy as np
import pytest

from experiments.benchmark.ratio import FEWEST_ROUNDS, PRECISION, ratio_of


def test_a_ratio_by_hand():
    own, other = {1: 2.0, 2: 4.0, 3: 8.0, 5: 1.0}, {1: 3.0, 2: 4.0, 3: 10.0, 4: 7.0}
    found = ratio_of(other, own)
    assert (found.median, found.low, found.high, found.rounds) == (1.25, 1.0, 1.5, 3)
    assert found.margin == 0.2
    assert not found.has_interval
    assert (found.verdict, str(found)) == ("undecided against", "1.250 (3 rounds)")
    assert ratio_of({1: 1.0}, {2: 1.0}) is None


def test_a_verdict_needs_six_rounds_and_an_interval_without_1():
    wide = ratio_of({at: 1.0 + 0.5 * (at % 2) for at in range(6)}, dict.fromkeys(range(6), 1.0))
    assert (wide.verdict, str(wide)) == ("undecided against", "1.250 [1.000, 1.500]")
    narrow = ratio_of({at: 0.99 + 0.02 * (at % 2) for at in range(6)}, dict.fromkeys(range(6), 1.0))
    assert (narrow.verdict, str(narrow)) == ("level with", "1.000 [0.990, 1.010]")
    five = dict.fromkeys(range(5), 1.1)
    assert ratio_of(five, dict.fromkeys(five, 1.0)).verdict == "undecided against"


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "ahead of"), (0.9, "behind")])
def test_what_slows_a_whole_round_does_not_blur_the_ratio(factor, verdict):
    load = dict(enumerate([1.0, 1.4, 0.9, 2.5, 1.1, 1.0]))
    found = ratio_of({at: factor * seconds for at, seconds in load.items()}, load)
    assert found.low == pytest.approx(factor)
    assert found.high == pytest.approx(factor)
    assert found.verdict == verdict
    assert found.is_known


def test_too_few_rounds_or_a_wide_interval_are_not_known():
    own = dict.fromkeys(range(FEWEST_ROUNDS), 1.0)
    assert ratio_of(own, own).is_known
    assert not ratio_of(dict.fromkeys(range(FEWEST_ROUNDS - 1), 1.0), own).is_known
    wide = {at: 1.0 + 2.5 * PRECISION * (at % 2) for at in range(20)}
    assert not ratio_of(wide, dict.fromkeys(range(20), 1.0)).is_known


@pytest.mark.parametrize("rounds", [6, 10, 20])
def test_the_interval_covers_the_true_ratio_in_about_95_of_100_contests(rounds):
    draws, covered = np.random.default_rng(0), 0
    for _ in range(300):
        noise = np.exp(0.04 * draws.standard_normal((2, rounds)))
        found = ratio_of(dict(enumerate(1.05 * noise[0])), dict(enumerate(noise[1])))
        covered += found.low <= 1.05 <= found.high
    assert 0.91 <= covered / 300 <= 0.995


def test_the_interval_covers_the_true_ratio_although_rounds_end_once_it_is_narrow():
    draws, covered = np.random.default_rng(0), 0
    for _ in range(300):
        noise = np.exp(0.03 * draws.standard_normal((2, 40)))
        for rounds in range(2, 41, 2):
            found = ratio_of(dict(enumerate(1.05 * noise[0, :rounds])), dict(enumerate(noise[1, :rounds])))
            if found.is_known:
                break
        covered += found.low <= 1.05 <= found.high
    assert covered / 300 >= 0.9
