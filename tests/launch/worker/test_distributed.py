"""How a worker joins the others."""

import resource
import threading
import time
from collections import Counter

import torch.distributed as dist

from launch.backends.processes import run_processes
from launch.worker import distributed
from launch.worker.distributed import OPEN_FILES, init_process_group

SOFT = 64
"""Of open files, before a worker joins."""


def joined(rank, world, rendezvous):
    """Returns the limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    init_process_group(rank, world, rendezvous, 1)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_worker_raises_a_small_limit_of_open_files():
    """gloo has a descriptor for each other worker and group."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_processes(joined, 2) == [min(hard, OPEN_FILES)] * 2


class CountingStore:
    """Counts the calls of all its users."""

    def __init__(self):
        self.store, self.calls = dist.HashStore(), Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self.store, name)


def test_workers_meet_with_two_calls_each_however_late_the_last_one_is():
    store, came = CountingStore(), []
    workers = [
        threading.Thread(target=lambda: came.append(distributed._wait_for_all(store, 64)), daemon=True)
        for _ in range(64)
    ]
    for worker in workers[:-1]:
        worker.start()
    time.sleep(0.2)
    assert not came
    workers[-1].start()
    for worker in workers:
        worker.join(10)
    assert len(came) == 64
    assert store.calls == {"add": 64, "wait": 64, "set": 1}
