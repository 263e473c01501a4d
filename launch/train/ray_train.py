"""``launch.train_loop``: the processes of a TorchTrainer are the ranks of one run, as torchrun's are with LAUNCHER=env.

TorchTrainer --> its processes --> train_loop     rank 0 starts the run, or resumes the one that it finds
<storage_path>/<name>/             runs/.../      each rank runs a worker as a child process
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import ray.train
import torch
from pyarrow.fs import LocalFileSystem
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import get_device
from ray.train.v2.api.report_config import CheckpointUploadMode
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from experiments.registry import read_experiment_file
from launch.backends.env_ranks import JOIN_S, Ranks, lead
from launch.backends.network_interface import rendezvous_store
from launch.backends.stage_actor import PRELOAD
from launch.runs.checkpoints import steps_in_folder
from launch.runs.store import RUNS, RunFolder, known_runs, run_at
from launch.terminal import Terminal
from launch.train.command import resume, start
from launch.train.finished import finished_record
from suite.errors import SettingError, WorkerError
from suite.paths import read_json

KEYS = {"name", "scale", "settings"}


def train_loop(config: Mapping[str, Any]) -> None:
    """Trains on this rank of the trainer; see ``launch.train_loop``."""
    if "name" not in config or config.keys() - KEYS:
        raise SettingError(f"train_loop_config has {sorted(config)}; it takes a name, and settings and scale")
    if not isinstance(ray.train.get_context().get_storage().storage_filesystem, LocalFileSystem):
        raise SettingError(
            "RunConfig's storage_path is an object store; give a folder that all nodes share, and for checkpoints in a "
            "store the setting train.checkpoint_dir=s3://..."
        )
    metrics, checkpoint, ranks = dict[str, Any](), None, _join()
    if ranks.rank == 0:
        lead(ranks, lambda: _start_or_resume(**config))
        metrics, checkpoint = _outcome()
    elif code := ranks.serve():
        raise WorkerError(f"rank 0 ended with exit code {code}; its error says why")
    ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def _join() -> Ranks:
    """Returns this process among the trainer's."""
    context, host, store = ray.train.get_context(), ray.util.get_node_ip_address(), None  # type: ignore[no-untyped-call]
    if context.get_world_rank() == 0:
        store = rendezvous_store(host)
    address = broadcast_from_rank_zero(f"{host} {store.port}" if store is not None else "")
    if store is None:
        host, port = address.split()
        store = TCPStore(host, int(port), timeout=timedelta(seconds=JOIN_S))
    device = get_device()
    is_gpu = isinstance(device, torch.device) and device.type == "cuda"
    local = device.index if is_gpu else context.get_local_rank()
    return Ranks(context.get_world_rank(), context.get_world_size(), local, store, address, PRELOAD)


def _run() -> RunFolder | None:
    """Returns this trainer's run, None before it has started."""
    known = known_runs()
    return run_at(str(RUNS / known[0])) if known else None


def _start_or_resume(name: str, scale: Any = "auto", settings: str = "") -> None:
    run = _run()
    if run is None:
        start(name, scale, settings, "env", Terminal())
    elif finished_record(run, read_experiment_file(run.experiment)) is None:
        resume(str(run.path), "", "env", Terminal())


def _outcome() -> tuple[dict[str, Any], ray.train.Checkpoint | None]:
    """Returns the numbers of the finished run's record with its folder, and its newest checkpoint."""
    run = _run()
    assert run is not None
    numbers = {name: value for name, value in (read_json(run.record) or {}).items() if isinstance(value, int | float)}
    newest = [ray.train.Checkpoint(str(run.checkpoints / f"{step:08}")) for step in steps_in_folder(run)][-1:]
    return numbers | {"run": str(run.path)}, newest[0] if newest else None
