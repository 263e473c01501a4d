"""How a worker joins the others: what that takes of the store and of descriptors grows with its peers, not with all."""

import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch.backends.processes import run_processes
from launch.worker.distributed import OPEN_FILES, init_process_group
from suite.pipeline.model.topology import RankCoord, make_groups

SOFT = 64
"""Of open files, before a worker joins."""


class Counted(dist.Store):
    """A store that counts its calls."""

    def __init__(self, path, world):
        super().__init__()
        self._store, self.calls = dist.FileStore(path, world), 0

    def __getattribute__(self, name):
        if name in ("set", "get", "wait", "add", "check", "compare_set"):
            self.calls += 1
        return object.__getattribute__(self, name)

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        return self._store.get(key)

    def wait(self, *arguments):
        self._store.wait(*arguments)

    def add(self, key, value):
        return self._store.add(key, value)

    def check(self, keys):
        return self._store.check(keys)


def joined(rank, world, rendezvous, path):
    """Joins, makes all groups of a pipeline, and sends a message to the next rank. Returns the calls of the store, the
    descriptors that this took, and the limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    before, store = len(os.listdir("/proc/self/fd")), Counted(path, world)
    init_process_group(rank, world, store, 1)
    groups, message = make_groups(RankCoord(rank, world, 1), 60.0), torch.ones(1)
    if rank:
        dist.recv(message, rank - 1, group=groups.activations[0])
    if rank < world - 1:
        dist.send(message, rank + 1, group=groups.activations[0])
    took = store.calls, len(os.listdir("/proc/self/fd")) - before, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    dist.barrier()
    return took


@pytest.fixture(scope="module")
def found():
    with tempfile.TemporaryDirectory() as folder:
        return {world: run_processes(joined, world, str(Path(folder) / str(world))) for world in (4, 8)}


def test_calls_of_the_store_and_descriptors_of_a_worker_do_not_grow_with_all_workers(found):
    """An inner stage has two peers, however many stages there are; one for each further worker would be four more."""
    for at in (0, 1):
        assert max(took[at] for took in found[8]) < max(took[at] for took in found[4]) + 4


def test_a_worker_raises_a_small_limit_of_open_files(found):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert {limit for took in found.values() for *_, limit in took} == {min(hard, OPEN_FILES)}
