"""Margins of means."""

from experiments.sweeps.report.margins import mean_and_margin


def test_the_margin_is_the_95_percent_interval_of_the_mean():
    """4.303 is the t value of two degrees of freedom."""
    assert mean_and_margin([1.0, 2.0, 3.0]) == f"2 ± {4.303 * 1 / 3**0.5:.2g}"
    assert mean_and_margin([0.5]) == "0.5"
    assert mean_and_margin([]) is None
