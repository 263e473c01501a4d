"""Joins a process to torch.distributed, and times messages between its processes."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from launch.worker.gpu_environment import gpu_environment
from suite.device import synchronize
from suite.pipeline.model.topology import backend_of

GROUP_TIMEOUT_S = 300.0
"""Timeout of a collective in seconds, unless planned steps are long; much longer than the wait for a checkpoint."""

REPEATS = 9
"""How often a message is timed."""

BUSY_S, EXCHANGES = 0.002, 32
"""Seconds that two ranks compute between exchanges, as a short action does; exchanges that are timed together."""


def init_process_group(
    rank: int,
    world: int,
    rendezvous: str | Store,
    threads: int | None = None,
    gpu: int | None = None,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> torch.device:
    """Joins the default process group, by a URL or in a store; returns this process's device: the GPU of index ``gpu``,
    or the CPU. Also sets torch's ``threads``, if given; on a GPU ``gpu_environment`` and the kernel of attention."""
    if threads is not None:
        torch.set_num_threads(threads)
    if gpu is not None:
        os.environ.update(gpu_environment())
        torch.cuda.set_device(gpu)
        # cuDNN's attention takes 122 ms at each new shape, which packed text has many of; the other kernel takes 0.4,
        # and as long in a step (docs/results/gpu.md)
        torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    where: dict[str, Any] = {"init_method": rendezvous} if isinstance(rendezvous, str) else {"store": rendezvous}
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend_of(device), rank=rank, world_size=world, timeout=timeout, **where)
    return device


def one_way_s(peer: int, size: int, device: torch.device) -> float:
    """Returns the seconds of a message of ``size`` bytes to another rank, which must call this too: half a round trip
    that the lower rank starts."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    send_first = dist.get_rank() < peer

    def round_trip() -> None:
        dist.send(message, peer) if send_first else dist.recv(message, peer)
        dist.recv(message, peer) if send_first else dist.send(message, peer)

    return time_s(round_trip, device) / 2


def busy_exchange_s(peer: int) -> float:
    """Returns the seconds that an exchange of one byte costs two ranks that both compute, on gloo: there the threads
    that carry messages wait for a core.

    The ranks exchange as stages do: two receives are posted ahead, and up to four sends are unfinished.
    """
    factor, message = torch.rand(256, 256), torch.zeros(1, dtype=torch.uint8)
    products = max(1, round(BUSY_S / time_s(lambda: torch.mm(factor, factor), factor.device)))

    def seconds(exchanges: int) -> float:
        dist.send(message, peer) if dist.get_rank() < peer else dist.recv(message, peer)  # both begin together
        receives, sends = deque[Any](), deque[Any]()
        receives.extend(dist.irecv(message.clone(), peer) for _ in range(min(2, exchanges)))
        begin = time.perf_counter()
        for i in range(EXCHANGES):
            for _ in range(products):
                torch.mm(factor, factor)
            if not exchanges:
                continue
            sends.append(dist.isend(message.clone(), peer))
            receives.popleft().wait()
            if i + 2 < exchanges:
                receives.append(dist.irecv(message.clone(), peer))
            if len(sends) > 4:
                sends.popleft().wait()
        while sends:
            sends.popleft().wait()
        return time.perf_counter() - begin

    rounds = [(seconds(EXCHANGES), seconds(0)) for _ in range(5)]
    exchanged_s = statistics.median(exchanged for exchanged, _ in rounds)
    return max(0.0, exchanged_s - statistics.median(alone for _, alone in rounds)) / EXCHANGES


def time_s(action: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of an action: the lower quartile, because other load on the machine only adds time."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[REPEATS // 4]
