"""A run over a store that fails at any call loses no published checkpoint."""

from launch.backends.processes import run_processes
from tests.suite.training.checkpoint.power_cut_model import LEFT, cut_everywhere
from tests.suite.training.checkpoint.storage_model import WAYS, fail_everywhere, fail_twice_everywhere, meet_everywhere


def test_a_store_that_fails_at_any_call_loses_nothing():
    ((calls, outcomes),) = run_processes(fail_everywhere, 1, 1, deadline_s=1500.0)
    print(calls, outcomes)
    assert sum(outcomes.values()) == calls * len(WAYS)


def test_a_resume_that_fails_at_any_call_after_a_crash_at_any_call_loses_nothing():
    (pairs,) = run_processes(fail_twice_everywhere, 1, 1, deadline_s=1500.0)
    print(pairs)
    assert pairs > 2000


def test_a_second_driver_at_any_call_loses_nothing_to_the_first():
    (wrote,) = run_processes(meet_everywhere, 1, 1)
    print(wrote)
    assert wrote["second"] > 10 * wrote["first"]


def test_a_power_cut_at_any_call_loses_nothing():
    (calls,) = run_processes(cut_everywhere, 1, 1, deadline_s=1500.0)
    print(calls, "calls,", calls * len(LEFT), "power cuts")
    assert calls > 60
