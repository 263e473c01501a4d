"""Joins a process to torch.distributed, and times messages between its processes."""

from __future__ import annotations

import os
import time
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


def time_s(action: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of an action: the lower quartile, because other load on the machine only adds time."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[REPEATS // 4]
