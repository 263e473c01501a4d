"""The inverse-square-root schedule."""

import pytest

from suite.training.learning_rate import learning_rate


def test_rises_to_the_peak_and_falls_with_the_root():
    rates = [learning_rate(step, 0.4, 10) for step in range(160)]
    assert rates[0] == pytest.approx(0.04)
    assert max(rates) == rates[9] == 0.4
    assert rates[39] == pytest.approx(0.2)  # four times the warm-up: half the peak
    assert rates[159] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
