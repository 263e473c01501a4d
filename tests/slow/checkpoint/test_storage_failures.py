"""A run over a store that fails at any call loses no published checkpoint."""

from functools import partial

from fsspec.implementations.memory import MemoryFileSystem

from launch.backends.processes import run_processes
from tests.suite.training.checkpoint.power_cut_model import LEFT, cut_everywhere
from tests.suite.training.checkpoint.saves import newest_of, step_of
from tests.suite.training.checkpoint.storage_model import (
    WAYS,
    Calls,
    Life,
    fail_everywhere,
    lived,
    meet_everywhere,
    outcome,
    ready,
)


def fail_twice_everywhere(rank, world, rendezvous, every):
    """Ends the process at each ``every``-th call, and then fails once at each call of the resume that follows. Returns
    how many such pairs there were."""
    worker, pairs, files = ready(rank, world, rendezvous), 0, MemoryFileSystem()
    total, _ = outcome(worker, "memory://twice/undisturbed")
    for crash_at in range(1, total + 1, every):
        begun = f"/twice/{crash_at}"
        published = lived(worker, f"memory:/{begun}", Calls(crash_at, "crash"))[0].published
        calls, fail_at = 1, 0
        while fail_at < calls:  # until a life has fewer calls
            fail_at, pairs, again = fail_at + 1, pairs + 1, f"{begun}-{fail_at}"
            if files.exists(begun):
                files.copy(begun, again, recursive=True)
            failing = Calls(fail_at, "once")
            go_on = partial(Life.go_on, least=max(published, default=0))
            later = lived(worker, f"memory:/{again}", failing, go_on)[0].published
            calls, step = failing.count, step_of(newest_of(f"memory:/{again}"))
            assert step >= max([*published, *later], default=0), (crash_at, fail_at, step, published, later)
            if files.exists(again):
                files.rm(again, recursive=True)
    return pairs


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
