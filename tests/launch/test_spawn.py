"""Plain processes: results by rank, the first failure, and no one left behind."""

import os
import subprocess
import sys
import time

import pytest

from launch.spawn import PRELOAD, PRELOAD_LATE, run_processes
from suite.errors import SettingError, WorkerError


def answer(rank, world, rendezvous, offset):
    return rank + offset, world


def fail(rank, world, rendezvous, kind):
    if rank == 1:
        if kind == "user":
            raise SettingError("a user's fault")
        if kind == "bug":
            raise ZeroDivisionError("a bug")
        os._exit(7)
    time.sleep(120)


def begin(rank, world, rendezvous):
    """Returns the modules that a worker begins with, and the seconds of a processor that its beginning took."""
    return set(sys.modules), time.process_time()


def sleep(rank, world, rendezvous):
    time.sleep(120)


def test_results_come_by_rank():
    assert run_processes(answer, 3, 10) == [(10, 3), (11, 3), (12, 3)]


def test_a_worker_begins_with_what_it_needs_already_imported():
    """A preloaded name that cannot be imported is passed over in silence, and each worker pays for it."""
    names = [*PRELOAD, *PRELOAD_LATE]
    code = f"import importlib, time\nfor name in {names}: importlib.import_module(name)\nprint(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = float(done.stdout.splitlines()[-1])
    for modules, seconds in run_processes(begin, 2):
        assert {*names, "torch._dynamo"} <= modules
        assert seconds < imported / 2


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("user", SettingError, "^a user's fault$"),
        ("bug", RuntimeError, "worker 1 failed"),
        ("death", WorkerError, "code 7"),
    ],
)
def test_the_first_failure_ends_all_workers_at_once(kind, error, message):
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        run_processes(fail, 2, kind)
    assert time.monotonic() - begin < 30


def test_a_deadline_ends_workers_that_do_not_finish():
    with pytest.raises(WorkerError, match=r"workers \[0, 1\] gave no result in time"):
        run_processes(sleep, 2, deadline_s=1.0)
