"""Starts and supervises the K x R workers with Ray Train; no tensor of the training goes through Ray."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment
from launch.devices import cores
from launch.engine import GROUP_TIMEOUT
from launch.worker import Job, threads_of
from suite.errors import NeighbourLostError, PlacementError, SuiteError, WorkerError
from suite.pipeline.recipe import Recipe

START_DEADLINE = 180
"""Seconds for all workers to be placed and started."""


def run(job: Job, experiment: Experiment) -> None:
    """Runs a job on the Ray cluster of ``RAY_ADDRESS``, or on one started here and ended with the job.

    Raises the first SuiteError of a worker; PlacementError when the cluster is away or too
    small; WorkerError otherwise.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(START_DEADLINE))
    # Ray warns of a coming change in what a worker without a GPU sees; ours are told their device, and do not look
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    workers = experiment.pipeline.stages * experiment.pipeline.replicas
    config = {
        "folder": str(job.folder), "data": str(job.data), "cells": list(job.cells),
        "recipe": asdict(job.recipe),
        "use_gpu": job.use_gpu, "resume": job.resume,
    }  # fmt: skip
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        _connect(ray, workers, experiment)
        signal.signal(signal.SIGTERM, on_terminate)  # Ray sets one that exits without a word
        check_room("GPU" if job.use_gpu else "CPU", workers, *_resources(ray))
        trainer = TorchTrainer(
            _loop,
            train_loop_config=config,
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if job.use_gpu else "gloo", timeout_s=int(GROUP_TIMEOUT)
            ),
            scaling_config=ray.train.ScalingConfig(
                num_workers=workers,
                use_gpu=job.use_gpu,
                resources_per_worker={"GPU": 1} if job.use_gpu else {"CPU": 1},
            ),
            run_config=ray.train.RunConfig(
                name="ray-train",
                storage_path=str(job.folder),
                # nothing is tried again unseen, least of all the wait for devices
                failure_config=ray.train.FailureConfig(
                    max_failures=0,
                    controller_failure_limit=0,  # type: ignore[call-arg]  # of Ray Train v2, whose types lag behind
                    max_preemption_failures=0,
                ),
            ),
        )
        _fit(trainer)
    except Exception as error:
        raise first_cause(error, job, experiment) from error
    finally:
        ray.shutdown()


def _fit(trainer: Any) -> None:
    """Runs the trainer to its end, or until this thread is interrupted.

    In a thread of its own, because in the main one Ray Train answers an interrupt itself, by ending the process with
    exit code 0 and no word. Here the interrupt ends the wait, and ``ray.shutdown`` the workers.
    """
    failures: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
    if failures:
        raise failures[0]


def _connect(ray: Any, workers: int, experiment: Experiment) -> None:
    """Connects to the cluster of RAY_ADDRESS, or starts Ray on this machine when that is not set."""
    variables = {"OMP_NUM_THREADS": str(threads_of(experiment)), "TOKENIZERS_PARALLELISM": "false"}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": {"env_vars": variables}}
    if address := os.environ.get("RAY_ADDRESS"):
        _check_reachable(address)
        ray.init(**quiet)
    else:
        # more stages than cores are allowed here: they take turns, and the plan says so
        ray.init(address="local", num_cpus=max(cores(), workers), include_dashboard=False, **quiet)


def _check_reachable(address: str) -> None:
    """Raises PlacementError when nothing answers at ``host:port``: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise PlacementError(
            f"no Ray cluster answers at {address} ({error}); start one there, or unset RAY_ADDRESS to use this machine"
        ) from None


def _resources(ray: Any) -> tuple[dict[str, float], dict[str, float]]:
    return ray.cluster_resources(), ray.available_resources()


def check_room(kind: str, workers: int, total: dict[str, float], free: dict[str, float]) -> None:
    """Raises PlacementError when a cluster has too few devices of a kind, or too few that are free now."""
    if min(total.get(kind, 0), free.get(kind, 0)) < workers:
        raise PlacementError(
            f"{workers} workers need {workers} {kind}s; the Ray cluster has {total.get(kind, 0):.0f}, of which "
            f"{free.get(kind, 0):.0f} are free; lower pipeline.stages or pipeline.replicas, wait, or add nodes"
        )


def _loop(config: dict[str, Any]) -> None:
    """What Ray Train calls in each worker."""
    import ray.train

    from launch.worker import work

    cells = tuple(map(int, config["cells"]))
    recipe = Recipe(**config["recipe"] | {"graphs": tuple(map(int, config["recipe"]["graphs"]))})
    folder, data = Path(config["folder"]), Path(config["data"])
    job = Job(folder, data, cells, recipe, bool(config["use_gpu"]), bool(config["resume"]))
    work(job, ray.train.get_context().get_world_rank())


def first_cause(error: Exception, job: Job, experiment: Experiment) -> SuiteError:
    """Returns the first cause: a user fault of any worker, before others that only lost their neighbour to it."""
    if isinstance(error, SuiteError):
        return error
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    causes = [(rank, _unwrap(failure)) for rank, failure in sorted(failures.items())]
    faults = [cause for _, cause in causes if isinstance(cause, SuiteError)]
    faults.sort(key=lambda fault: isinstance(fault, NeighbourLostError))
    others = [(rank, cause) for rank, cause in causes if not isinstance(cause, SuiteError)]
    if faults and not (others and isinstance(faults[0], NeighbourLostError)):
        return faults[0]
    if not others:
        return WorkerError(f"Ray could not run the workers: {_first_line(_unwrap(error))}")
    rank, cause = others[0]
    stage, replica = rank % experiment.pipeline.stages, rank // experiment.pipeline.stages
    died = "Actor" in type(cause).__name__ or "Worker" in type(cause).__name__
    what = "its process ended (killed, or out of memory)" if died else f"{type(cause).__name__}: {_first_line(cause)}"
    return WorkerError(
        f"replica {replica}, stage {stage}: {what}; its log is {job.run.log(replica, stage)}; when mended, "
        f"`make resume RUN={job.folder}` goes on from the last checkpoint"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unwrap(error: BaseException) -> BaseException:
    """Looks inside Ray's wrappers for the error that a worker raised."""
    for name in ("cause", "controller_failure", "_base_exc", "training_error", "__cause__"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException) and inner is not error:
            return _unwrap(inner)
    return error
