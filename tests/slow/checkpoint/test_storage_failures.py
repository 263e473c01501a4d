"""A run over a store that fails at any call loses no published checkpoint."""

from launch.backends.processes import run_processes
from tests.suite.training.checkpoint.storage_model import WAYS, fail_everywhere


def test_a_store_that_fails_at_any_call_loses_nothing():
    ((calls, outcomes),) = run_processes(fail_everywhere, 1, 1)
    print(calls, outcomes)
    assert sum(outcomes.values()) == calls * len(WAYS)
