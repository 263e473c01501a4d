"""What a worker asks of the store when it joins a run, and how many descriptors it holds then: counted in real
processes, as a run on CPU cores makes its groups."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from launch.backends.processes import run_processes
from launch.worker.distributed import init_process_group
from suite.pipeline.model.topology import RankCoord, make_groups


class Joined(NamedTuple):
    """One worker."""

    calls: int
    """Of the store."""
    sent_bytes: int
    """In its keys and values."""
    descriptors: int


class CountingStore(dist.Store):
    """Counts what a worker asks of its store."""

    def __init__(self, store):
        super().__init__()
        self.store, self.calls, self.sent_bytes = store, Counter(), 0

    def _count(self, call, *sent):
        self.calls[call] += 1
        self.sent_bytes += sum(map(len, sent))

    def set(self, key, value):
        self._count("set", key, value)
        self.store.set(key, value)

    def get(self, key):
        self._count("get", key)
        return self.store.get(key)

    def add(self, key, number):
        self._count("add", key)
        return self.store.add(key, number)

    def wait(self, keys, *timeout):
        self._count("wait", *keys)
        self.store.wait(keys, *timeout)

    def check(self, keys):
        self._count("check", *keys)
        return self.store.check(keys)

    def set_timeout(self, timeout):
        self.store.set_timeout(timeout)


def _join(rank: int, world: int, rendezvous: str, stages: int) -> Joined:
    store = CountingStore(dist.FileStore(rendezvous.removeprefix("file://"), world))
    init_process_group(rank, world, store)
    make_groups(RankCoord(rank, stages, world // stages), 60.0)
    dist.barrier()
    found = Joined(store.calls.total(), store.sent_bytes, len(list(Path("/proc/self/fd").iterdir())))
    dist.barrier()
    return found


def joined(stages: int, replicas: int) -> Joined:
    """Returns the means of the workers of K x R."""
    found = run_processes(_join, stages * replicas, stages)
    return Joined(*(round(sum(column) / len(found)) for column in zip(*found, strict=True)))
