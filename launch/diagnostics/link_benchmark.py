"""Latency and bandwidth between processes of a torch.distributed group: pair by pair, and for an all-reduce.

Two message sizes give both: the small one costs the latency, and the large one's extra time is due to its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from suite.pipeline.model.topology import backend_of
from suite.pipeline.planning.simulate import Link

TIMEOUT_S = 60.0
"""Seconds for one message."""

REPEATS = 9

LARGE_S = 0.1
"""Target seconds of the large message, so that a slow link does not delay the others."""

LEAST, MOST = 2**18, 2**24
"""Smallest and largest size of the large message in bytes: from a laptop run's boundary to that of the paper."""


PROBE = 2**20
"""Size in bytes of the message by which links are compared."""


@dataclass(frozen=True)
class LinkTask:
    """What a group of processes measures: pairs of ranks in turn, then an all-reduce over the ``reduced`` ranks."""

    pairs: tuple[tuple[int, int], ...]
    reduced: tuple[int, ...]


@dataclass(frozen=True)
class TaskResult:
    """The measurements of one process: the pairs of which it is the first rank, and the all-reduce."""

    pairs: dict[tuple[int, int], Link]
    reduced: Link | None


def open_store(address: str) -> TCPStore:
    """Returns a new store where processes can meet, on a port that the system chooses."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


def join_store(address: str, port: int) -> TCPStore:
    """Returns a connection to another process's store."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


def measure(rank: int, world: int, rendezvous: str | Store, task: LinkTask, use_gpu: bool) -> TaskResult:
    """Joins the other processes, by a URL or in a store, and measures; in a pair the second rank only answers."""
    torch.set_num_threads(1)
    device = torch.device("cuda") if use_gpu else torch.device("cpu")
    timeout = timedelta(seconds=TIMEOUT_S)
    where: dict[str, Any] = {"init_method": rendezvous} if isinstance(rendezvous, str) else {"store": rendezvous}
    dist.init_process_group(backend_of(device), rank=rank, world_size=world, timeout=timeout, **where)
    found = {}
    for pair in task.pairs:
        dist.all_reduce(torch.zeros(1))  # nobody else sends meanwhile
        if rank in pair:
            link = _pair_link(rank == pair[0], pair[1] if rank == pair[0] else pair[0], device)
            if rank == pair[0]:
                found[pair] = link
    group = dist.new_group(list(task.reduced), timeout=timeout) if task.reduced else None
    reduced = _reduction(group, len(task.reduced), device) if rank in task.reduced and group is not None else None
    dist.destroy_process_group()
    return TaskResult(found, reduced)


def _pair_link(first: bool, other: int, device: torch.device) -> Link:
    def hop(size: int) -> float:
        message = torch.zeros(size, dtype=torch.uint8, device=device)

        def round_trip() -> None:
            dist.send(message, other) if first else dist.recv(message, other)
            dist.recv(message, other) if first else dist.send(message, other)

        return _time_s(round_trip, device) / 2

    return _fit_link(hop, 1, lambda size: _share_size(first, other, size))


def _share_size(first: bool, other: int, size: int) -> int:
    """Returns the first rank's size, on both."""
    shared_size = torch.tensor([size])
    dist.send(shared_size, other) if first else dist.recv(shared_size, other)
    return int(shared_size)


def _reduction(group: dist.ProcessGroup, world: int, device: torch.device) -> Link:
    def reduce(size: int) -> float:
        values = torch.zeros(max(1, size // 4), device=device)
        return _time_s(lambda: dist.all_reduce(values, group=group), device)

    def agreed(size: int) -> int:
        shared_size = torch.tensor([size])
        dist.all_reduce(shared_size, dist.ReduceOp.MIN, group=group)
        return int(shared_size)

    link = _fit_link(reduce, 4, agreed)
    return Link(link.latency_s, link.bytes_per_s * 2 * (world - 1) / world)


def _fit_link(measure_s: Callable[[int], float], small: int, agree_on_size: Callable[[int], int]) -> Link:
    measure_s(small)  # the first message opens the connection
    latency = measure_s(small)
    trial = measure_s(LEAST)
    rate = LEAST / max(trial - latency, 1e-6)
    size = agree_on_size(int(min(MOST, max(LEAST, rate * LARGE_S))))
    return Link(latency, size / max(measure_s(size) - latency, 1e-9))


def _time_s(action: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of an action: the lower quartile, because other load on the machine only adds time."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[REPEATS // 4]


def slowest(links: Sequence[Link]) -> Link | None:
    """Returns the link on which a message of PROBE bytes takes longest."""
    return max(links, key=lambda link: link.seconds(PROBE)) if links else None
