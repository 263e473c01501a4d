"""Margins of means and of differences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.sweeps.report.margins import difference, mean_and_margin

NUMBERS = st.floats(-100, 100)


def test_the_margin_is_the_95_percent_interval_of_the_mean():
    """4.303 is the t value of two degrees of freedom."""
    assert mean_and_margin([1.0, 2.0, 3.0]) == f"2 ± {4.303 * 1 / 3**0.5:.2g}"
    assert mean_and_margin([0.5]) == "0.5"
    assert mean_and_margin([]) is None
    assert mean_and_margin([3.0, float("nan"), 3.1]) == "nan ± nan"  # of a seed that diverged


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=4), min_size=2, max_size=6))
def test_the_margin_is_students_and_the_verdict_is_antisymmetric(groups):
    more, less = groups[:2]
    one, other = difference(more, less, groups), difference(less, more, groups)
    assert one.value == pytest.approx(-other.value)
    assert (one.margin is None) == all(len(group) == 1 for group in groups)
    turned = {"confirmed": "contradicted", "contradicted": "confirmed", "undecided": "undecided"}
    assert other.outcome == turned[one.outcome]


def test_the_margin_of_two_and_two_seeds_by_hand():
    # deviations 1 and 1 about both means: s^2 = (2 + 2) / 2, two degrees of freedom
    result = difference([3.0, 5.0], [0.0, 2.0], [[3.0, 5.0], [0.0, 2.0]])
    assert result.value == 3.0
    assert result.margin == pytest.approx(4.3026527 * 2**0.5)  # t(95%, 2)
    assert result.outcome == "undecided"
    assert difference([], [1.0], []) is None
