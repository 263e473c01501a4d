"""An agent: what Ray Train runs on each device. It starts one worker process for each attempt.

Ray Train's own processes take many seconds to start, for each imports Ray and PyTorch anew. An agent stays when its
worker dies; the next one is forked, within a tenth of a second, from a server that has imported everything.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from launch.cluster.dispatcher import Report
from launch.jobs import secrets
from launch.spawn import run_processes, train
from suite.errors import DiedError, ForkserverError, SuiteError, WorkerError

if TYPE_CHECKING:
    from launch.worker import Job

PRELOAD = ["ray._private.workers.default_worker"]
"""The program that an agent's process runs: multiprocessing imports it again in each worker."""

STORE_S = 300
"""Seconds for which a worker waits for the store in which all meet."""


def serve(config: dict[str, Any]) -> None:
    """Runs an agent until the dispatcher says that no attempt follows."""
    import ray.train

    secrets.receive()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "")  # whatever the host's name resolves to, and not loopback alone
    dispatcher, rank = config["dispatcher"], ray.train.get_context().get_world_rank()
    store = _open_store(dispatcher) if rank == 0 else None
    number = 0
    while (found := ray.get(dispatcher.next_attempt.remote(number))) is not None:
        attempt, address = found
        number = attempt["attempt"]
        report = _run_worker(dispatcher, rank, attempt, address)
        ray.get(dispatcher.report.remote(rank, number, report))
    del store


def _open_store(dispatcher: Any) -> Any:
    """Opens the store in which workers of all attempts meet. It stays with the agent, and so does its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    ray.get(dispatcher.set_store.remote(f"{host} {store.port}"))
    return store


def _run_worker(dispatcher: Any, rank: int, attempt: dict[str, Any], address: str) -> Report:
    """Runs the worker of a rank in a process of its own, until it ends or the attempt is over; returns how it ended."""
    over = dispatcher.over.remote(attempt["attempt"])
    node, device = ray.get_runtime_context().get_node_id(), _device() if attempt["use_gpu"] else 0
    try:
        run_processes(
            _work, 1, rank, address, attempt, node, device, deadline_s=365 * 86400.0,
            given_up=lambda: bool(ray.wait([over], timeout=0)[0]), preload=PRELOAD,
        )  # fmt: skip
    except DiedError as error:
        return DiedError(rank, error.how)
    except ForkserverError as error:
        return ForkserverError(f"on {socket.gethostname()}, for worker {rank}: {error}")
    except SuiteError as error:
        return error
    except RuntimeError as error:  # it failed before it could say where; its traceback stands in the text
        return WorkerError(f"a worker failed before it began, with {str(error).strip().splitlines()[-1]}")
    return None


def _device() -> int:
    """Returns which of the GPUs that this process sees is its own."""
    from ray.train.torch import get_device

    return int(get_device().index)


def _work(_: int, __: int, ___: str, rank: int, address: str, attempt: dict[str, Any], node: str, device: int) -> None:
    """What the worker's process does."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = address.split()
    # of its own name for each attempt: what an earlier one left there is not met
    store = PrefixStore(str(attempt["attempt"]), TCPStore(host, int(port), timeout=timedelta(seconds=STORE_S)))
    train(job_of(attempt), rank, device, node, store=store, world_size=attempt["workers"])


def job_of(attempt: dict[str, Any]) -> Job:
    """Returns the job of an attempt. Only workers import what it is made of."""
    from launch.worker import Job
    from suite.pipeline.recipe import Recipe

    cells = tuple(map(int, attempt["cells"]))
    recipe = Recipe(**attempt["recipe"] | {"graphs": tuple(map(int, attempt["recipe"]["graphs"]))})
    folder, data = Path(attempt["folder"]), Path(attempt["data"])
    return Job(
        folder, data, cells, recipe, bool(attempt["use_gpu"]), bool(attempt["resume"]), int(attempt["attempt"]),
        str(attempt["faults"]), float(attempt["step_s"]), bool(attempt["shrunk"]),
    )  # fmt: skip
