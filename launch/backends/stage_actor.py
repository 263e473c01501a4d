"""Ray actors each own a pipeline stage: one StageActor on each device, which starts the process that holds the stage.

driver          RayLauncher (ray_launcher.py)     chooses the nodes, names what failed
                    StageActors (stage_actors.py)     one for each rank, in a placement group
                      | run(attempt), stop()     ^ a stream of heartbeats, then the end
each device     StageActor                        owns the device, from the first attempt to the last
                      | fork                     ^ a file with its heartbeat; its error or exit code
                stage process                     train_stage: layers, optimizer, torch.distributed to its neighbours

Ray transfers no tensor. A process of Ray takes seconds to start, because it imports Ray and PyTorch. A StageActor
outlives its stage process, and has the next one within a second: its forkserver has imported everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from launch.backends.network_interface import rendezvous_store, use_interface_of
from launch.backends.processes import run_worker_alone
from launch.ray_nodes import own_node
from launch.worker.attempt import Attempt
from launch.worker.save_requests import END_FILE
from suite.errors import SuiteError

PRELOAD = ["ray._private.workers.default_worker"]
"""The main module of an actor's process: multiprocessing imports it again in each stage process."""

SEND_S, SENDS_PER_S = 0.5, 1000
"""Least seconds between two heartbeats of an actor; how many all actors together send in a second."""

Ended = SuiteError | None
"""How a stage process ended: its error, or None if it finished the job."""


class StageActor:
    """Owns a device, and runs one rank's stage of each attempt on it. ``stop`` has a thread of its own."""

    def __init__(self, rank: int, threads: int | None) -> None:
        """Each stage process computes with so many ``threads``; None: with its share of this machine's cores."""
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        use_interface_of(self._host)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "")  # that of the host name, instead of loopback
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._rank, self._threads, self._stopped = rank, threads, 0
        self._store: Any = None
        self._folder: Path | None = None
        """For the heartbeat of the stage process that runs."""

    def device(self) -> tuple[str, list[str]]:
        """Returns the node's id, and the id of its GPU; without GPUs an empty list."""
        return own_node(), ray.get_runtime_context().get_accelerator_ids().get("GPU", [])

    def open_store(self) -> str:
        """Returns the address of the store in which the stages of all attempts meet, as "host port". It stays open, so
        that its port stays the same."""
        self._store = self._store or rendezvous_store(self._host)
        return f"{self._host} {self._store.port}"

    def run(self, attempt: Attempt, store: str, gpus: Sequence[str]) -> Iterator[bytes | Ended]:
        """Runs the stage in a new process. Yields its heartbeats, after pauses, and then how it ended: by itself, or
        because it was stopped. ``gpus`` are those of all stages on this node: NCCL copies directly between two GPUs
        only if a process sees both."""
        os.environ["OMP_NUM_THREADS"] = str(self._threads or attempt.cores)  # before the forkserver starts
        device = None
        if attempt.use_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            device = gpus.index(self.device()[1][0])
        pause_s, sent = max(SEND_S, attempt.workers / SENDS_PER_S), b""
        with (
            TemporaryDirectory(prefix="gpipe-heartbeats-", ignore_cleanup_errors=True) as folder,
            ThreadPoolExecutor(1) as pool,
        ):
            self._folder = Path(folder)
            own = replace(attempt, heartbeats=self._folder)
            place = self._rank, store, str(attempt.number), own, device, own_node()
            ended = pool.submit(run_worker_alone, *place, lambda: self._stopped >= attempt.number, PRELOAD)
            while True:
                has_ended = bool(wait([ended], pause_s).done)
                heartbeat = b"".join(path.read_bytes() for path in Path(folder).glob("*.json"))
                if heartbeat not in (b"", sent):
                    sent = heartbeat
                    yield heartbeat
                if has_ended:
                    yield ended.result()
                    return

    def end_early(self) -> None:
        """Asks the stage process to save after this step and to end, and with it all others."""
        if self._folder is not None:
            (self._folder / END_FILE).touch()

    def stop(self, number: int) -> None:
        """Ends the stage process of an attempt, even if that has not begun here."""
        self._stopped = number
