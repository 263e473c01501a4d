"""How a worker joins the others."""

import resource

from launch.backends.processes import run_processes
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
