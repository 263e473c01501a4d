"""A run over a store that fails at some call loses no published checkpoint."""

from collections import Counter

from launch.backends.processes import run_processes
from tests.suite.training.checkpoint.power_cut_model import cut_everywhere
from tests.suite.training.checkpoint.storage_model import WAYS, fail_everywhere, meet_everywhere


def test_a_store_that_fails_at_every_ninetieth_call_loses_nothing():
    """All calls: ``tests/slow/checkpoint/test_storage_failures.py``."""
    ((calls, outcomes),) = run_processes(fail_everywhere, 1, 90)
    assert calls > 150
    lives = Counter(way for (way, _), count in outcomes.items() for _ in range(count))
    assert lives == dict.fromkeys(WAYS, len(range(1, calls + 1, 90)))
    assert outcomes["crash", "crashed"] == lives["crash"]
    assert outcomes["once", "whole"] > 0
    assert outcomes["for ever", "ended with an error"] > 0


def test_a_second_driver_at_every_fourth_call_loses_nothing_to_the_first():
    """All calls: as above."""
    (wrote,) = run_processes(meet_everywhere, 1, 4)
    assert wrote["second"] > 10 * wrote["first"]


def test_a_power_cut_at_every_fortieth_call_loses_nothing():
    """All calls: as above."""
    (calls,) = run_processes(cut_everywhere, 1, 40)
    assert calls > 60
