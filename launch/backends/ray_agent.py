"""An agent, which Ray Train runs on each device: it starts one worker process for each attempt.

Ray Train's own processes take many seconds to start, because each imports Ray and PyTorch. An agent survives the death
of its worker, and forks the next one within a tenth of a second from a server that has imported everything.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.train
from ray.train.torch import get_device

from launch.backends.network_interface import rendezvous_store, use_interface_of
from launch.backends.processes import run_worker_alone
from launch.backends.ray_dispatcher import Report
from launch.ray_nodes import own_node
from launch.worker.attempt import Attempt

PRELOAD = ["ray._private.workers.default_worker"]
"""The main module of an agent's process: multiprocessing imports it again in each worker."""

SEND_S, SENDS_PER_S = 0.5, 1000
"""Least seconds between two looks of an agent for changes; how many times all agents together look in a second."""

LAST_S = 10.0
"""Seconds for the last heartbeat to arrive."""


def serve(config: dict[str, Any]) -> None:
    """Runs an agent until the dispatcher has no further attempt."""
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    use_interface_of(host)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "")  # the interface that the host name resolves to, instead of loopback
    dispatcher, rank = config["dispatcher"], ray.train.get_context().get_world_rank()
    if rank == 0:  # the workers of all attempts meet in a store that this agent keeps, so that its port stays the same
        store = rendezvous_store(host)
        ray.get(dispatcher.set_store.remote(f"{host} {store.port}"))
    number = 0
    while (following := ray.get(dispatcher.next_attempt.remote(number))) is not None:
        attempt, address = following
        number = attempt.number
        with TemporaryDirectory(prefix="gpipe-heartbeats-", ignore_cleanup_errors=True) as folder:
            sender = Sender(dispatcher, rank, attempt, Path(folder))
            report = _run_worker(dispatcher, rank, attempt, address, sender)
            sender.send(last=True)
        ray.get(dispatcher.report.remote(rank, number, report))


class Sender:
    """Sends a worker's heartbeats to the dispatcher."""

    def __init__(self, dispatcher: Any, rank: int, attempt: Attempt, heartbeats: Path) -> None:
        """The worker of ``rank`` writes its heartbeat into the folder ``heartbeats``."""
        self.heartbeats = heartbeats
        self._dispatcher, self._rank, self._number = dispatcher, rank, attempt.number
        self._pause_s = max(SEND_S, attempt.workers / SENDS_PER_S)
        self._sent, self._due = b"", 0.0
        self._sending: Any = None

    def send(self, last: bool = False) -> None:
        """Sends a new heartbeat, after a pause and once the previous one has arrived. The ``last`` one is always sent,
        and waited for."""
        if not last and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._pause_s
        heartbeat = b"".join(path.read_bytes() for path in self.heartbeats.glob("*.json"))
        has_arrived = self._sending is None or bool(ray.wait([self._sending], timeout=0)[0])
        if heartbeat not in (b"", self._sent) and (last or has_arrived):
            self._sent = heartbeat
            self._sending = self._dispatcher.heartbeat.remote(self._rank, self._number, heartbeat)
        if last and self._sending is not None:
            ray.wait([self._sending], timeout=LAST_S)


def _run_worker(dispatcher: Any, rank: int, attempt: Attempt, address: str, sender: Sender) -> Report:
    """Runs the worker of a rank in a new process, until it ends or the attempt is over; returns how it ended."""
    over = dispatcher.over.remote(attempt.number)
    device = int(get_device().index) if attempt.use_gpu else None  # among the GPUs that this process sees

    def is_over() -> bool:
        sender.send()
        return bool(ray.wait([over], timeout=0)[0])

    own = replace(attempt, heartbeats=sender.heartbeats)
    return run_worker_alone(rank, address, str(attempt.number), own, device, own_node(), is_over, PRELOAD)
