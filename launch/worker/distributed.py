"""Joins a process to torch.distributed, and times messages between its processes."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from launch.worker.gpu_environment import gpu_environment
from suite.device import synchronize
from suite.pipeline.model.topology import backend_of
from suite.pipeline.planning.simulate import Link

GROUP_TIMEOUT_S = 300.0
"""Timeout of a collective in seconds, unless planned steps are long; much longer than the wait for a checkpoint."""

MEET_S = 1800.0
"""Longest wait for the last worker. The watchdog ends the attempt earlier if no further worker arrives."""

OPEN_FILES = 1 << 16
"""Enough for connections to thousands of workers; some systems begin with 1,024."""

REPEATS = 9
"""How often a message is timed."""

BUSY_S, EXCHANGES, ROUNDS = 0.002, 32, 5
"""Seconds that two ranks compute between exchanges, as a short action does; exchanges that are timed together, and how
often."""


def init_process_group(
    rank: int,
    world: int,
    rendezvous: str | Store,
    threads: int | None = None,
    gpu: int | None = None,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> torch.device:
    """Joins the default process group, by a URL or in a store; returns this process's device: the GPU of index ``gpu``,
    or the CPU. Also sets torch's ``threads``, if given; on a GPU ``gpu_environment`` and the kernel of attention.

    The soft limit of open files becomes OPEN_FILES, if the hard one is not lower: gloo connects each worker of a group
    with each other. Those of this group, of all workers, connect at their first message, and need a few connections
    each. In the others several cells a stage would hang so.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, OPEN_FILES)), most))
    if gpu is not None:
        os.environ.update(gpu_environment())
        torch.cuda.set_device(gpu)
        # cuDNN's attention takes 122 ms at each new shape, which packed text has many of; the other kernel takes 0.4,
        # and as long in a step (docs/results/gpu.md)
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not isinstance(rendezvous, str):
        _wait_for_all(rendezvous, world)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    where: dict[str, Any] = {"init_method": rendezvous} if isinstance(rendezvous, str) else {"store": rendezvous}
    timeout = timedelta(seconds=timeout_s)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        dist.init_process_group(backend_of(device), rank=rank, world_size=world, timeout=timeout, **where)
    finally:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    return device


def _wait_for_all(store: Store, world: int) -> None:
    """Waits for all workers, of which the last may have read Python from a cold disk; torch waits no longer than a
    collective may take."""
    if store.add("arrived", 1) == world:
        store.set("all", "")
    store.wait(["all"], timedelta(seconds=MEET_S))


def shared_gpu(rank: int, world: int) -> int:
    """Returns the GPU of a process on this machine. More processes than GPUs share them: NCCL refuses two ranks of a
    node on one GPU (NVIDIA/nccl#418), so each claims to be a node of its own, and messages pass the host's network."""
    count = torch.cuda.device_count()
    if world > count:
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
    return rank % count


def one_way_s(peer: int, size: int, device: torch.device) -> float:
    """Returns the seconds of a message of ``size`` bytes to another rank, which must call this too: half a round trip
    that the lower rank starts."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    send_first = dist.get_rank() < peer

    def round_trip() -> None:
        dist.send(message, peer) if send_first else dist.recv(message, peer)
        dist.recv(message, peer) if send_first else dist.send(message, peer)

    return time_s(round_trip, device) / 2


def busy_link(peer: int, idle: Link, size: int) -> Link:
    """Returns the link between two ranks that both compute, on gloo, from the one that they have when ``idle`` and from
    messages of 1 byte and of ``size`` bytes. Its threads need the cores, and no two rounds take equally long:

        at once    compute, send, receive | compute, send, receive      latency, as one waits for the other; overhead
        behind     compute, send          | compute, send, receive the one of two rounds before: overhead alone
    """
    factor = torch.rand(256, 256)
    count = torch.tensor([max(1, round(BUSY_S / time_s(lambda: torch.mm(factor, factor), factor.device)))])
    dist.send(count, peer) if dist.get_rank() < peer else dist.recv(count, peer)  # both compute equally long
    products = int(count)
    cases = ((0, 0), (1, 0), (1, 2), (size, 2))
    rounds = [[_round_s(peer, factor, products, *case) for case in cases] for _ in range(ROUNDS)]
    alone_s, at_once_s, behind_s, large_s = map(statistics.median, zip(*rounds, strict=True))
    overhead_s = max(0.0, behind_s - alone_s) / 2  # a round has two messages
    per_byte_s = max(0.0, large_s - behind_s) / 2 / size
    return Link(max(idle.latency_s, at_once_s - behind_s), idle.bytes_per_s, overhead_s, per_byte_s)


def _round_s(peer: int, factor: Tensor, products: int, size: int, behind: int) -> float:
    """Returns the seconds of a round: products, a message of ``size`` bytes to the peer, and the one from it of so many
    rounds before; without messages if the size is 0. As in a stage, two receives are posted ahead, and up to four sends
    are unfinished."""
    message = torch.zeros(max(1, size), dtype=torch.uint8)
    dist.send(message, peer) if dist.get_rank() < peer else dist.recv(message, peer)  # both begin together
    receives, sends = deque[Any](), deque[Any]()
    receives.extend(dist.irecv(torch.empty_like(message), peer) for _ in range(2 + behind if size else 0))
    begin = time.perf_counter()
    for i in range(EXCHANGES):
        for _ in range(products):
            torch.mm(factor, factor)
        if not size:
            continue
        sends.append(dist.isend(message, peer))
        if i >= behind:
            receives.popleft().wait()
            if i + 2 < EXCHANGES:
                receives.append(dist.irecv(torch.empty_like(message), peer))
        if len(sends) > 4:
            sends.popleft().wait()
    seconds = time.perf_counter() - begin
    for work in (*sends, *receives):
        work.wait()
    return seconds / EXCHANGES


def time_s(action: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of an action: the lower quartile, because other load on the machine only adds time."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[REPEATS // 4]
