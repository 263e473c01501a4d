"""Latency and bandwidth between processes that have met in torch.distributed: pair by pair, and all together.

Two sizes of message tell both: the small one is all latency; what the large one takes longer is its bytes.
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

from suite.pipeline.simulate import Link
from suite.pipeline.topology import backend_of

TIMEOUT_S = 60.0
"""Seconds that one message may take."""

REPEATS = 9

LARGE_S = 0.1
"""Seconds that the large message should take about, so that a slow link does not hold up the others' turn."""

LEAST, MOST = 2**18, 2**24
"""Bytes of the large message, at least and at most: from the boundary of a laptop's run to that of the paper's."""


PROBE = 2**20
"""Bytes of the message by which links are compared."""


@dataclass(frozen=True)
class Task:
    """What a group of processes measures: pairs of ranks in turn, then a reduction over ``reduced`` ranks."""

    pairs: tuple[tuple[int, int], ...]
    reduced: tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """What one process saw: the pairs that it was the first rank of, and the reduction."""

    pairs: dict[tuple[int, int], Link]
    reduced: Link | None


def open_store(address: str) -> TCPStore:
    """Returns a store where processes can meet; it listens on a port of the system's choice from now on."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


def join_store(address: str, port: int) -> TCPStore:
    """Returns a connection to the store that another process has opened."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))


def measure(rank: int, world: int, meeting: str | Store, task: Task, use_gpu: bool) -> Told:
    """Meets the others, by a URL or in a store, and measures; for a pair the second rank only answers."""
    torch.set_num_threads(1)
    device = torch.device("cuda") if use_gpu else torch.device("cpu")
    timeout = timedelta(seconds=TIMEOUT_S)
    where: dict[str, Any] = {"init_method": meeting} if isinstance(meeting, str) else {"store": meeting}
    dist.init_process_group(backend_of(device), rank=rank, world_size=world, timeout=timeout, **where)
    found = {}
    for pair in task.pairs:
        dist.all_reduce(torch.zeros(1))  # nobody else sends meanwhile
        if rank in pair:
            link = _between(rank == pair[0], pair[1] if rank == pair[0] else pair[0], device)
            if rank == pair[0]:
                found[pair] = link
    group = dist.new_group(list(task.reduced), timeout=timeout) if task.reduced else None
    reduced = _reduction(group, len(task.reduced), device) if rank in task.reduced and group is not None else None
    dist.destroy_process_group()
    return Told(found, reduced)


def _between(first: bool, other: int, device: torch.device) -> Link:
    def hop(size: int) -> float:
        message = torch.zeros(size, dtype=torch.uint8, device=device)

        def there_and_back() -> None:
            dist.send(message, other) if first else dist.recv(message, other)
            dist.recv(message, other) if first else dist.send(message, other)

        return _timed(there_and_back, device) / 2

    return _fitted(hop, 1, lambda size: _agreed(first, other, size))


def _agreed(first: bool, other: int, size: int) -> int:
    """Returns the first rank's size, on both."""
    told = torch.tensor([size])
    dist.send(told, other) if first else dist.recv(told, other)
    return int(told)


def _reduction(group: dist.ProcessGroup, world: int, device: torch.device) -> Link:
    def reduce(size: int) -> float:
        values = torch.zeros(max(1, size // 4), device=device)
        return _timed(lambda: dist.all_reduce(values, group=group), device)

    def agreed(size: int) -> int:
        told = torch.tensor([size])
        dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
        return int(told)

    link = _fitted(reduce, 4, agreed)
    return Link(link.latency_s, link.bytes_per_s * 2 * (world - 1) / world)


def _fitted(take: Callable[[int], float], small: int, agree: Callable[[int], int]) -> Link:
    take(small)  # connections are made with the first message
    latency = take(small)
    trial = take(LEAST)
    rate = LEAST / max(trial - latency, 1e-6)
    size = agree(int(min(MOST, max(LEAST, rate * LARGE_S))))
    return Link(latency, size / max(take(size) - latency, 1e-9))


def _timed(act: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of an act: the lower quartile, as what others do on the machine only ever adds."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[REPEATS // 4]


def slowest(links: Sequence[Link]) -> Link | None:
    """Returns the link that a message of PROBE bytes takes longest over."""
    return max(links, key=lambda link: link.seconds(PROBE)) if links else None
