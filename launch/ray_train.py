"""Starts and supervises the K x R workers with Ray Train; no tensor of the training goes through Ray."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.experiment import Experiment
from launch.beats import Beat
from launch.devices import cores
from launch.watch import Verdict, Watch
from launch.worker import Job, threads_of
from suite.errors import DiedError, NeighbourLostError, PlacementError, StallError, SuiteError, WorkerError
from suite.pipeline.recipe import Recipe

START_DEADLINE = 180
"""Seconds for all workers to be placed and started."""

ANSWER_S = 2.0
"""Seconds in which a node that is there takes a connection."""

SPARE_S = 20.0
"""Seconds for which lost devices are waited for before a run goes on with fewer, or ends."""

END_S = 15.0
"""Seconds that Ray Train may take to see that a worker was ended; then the session is."""


class RaySession:
    """A context in which attempts run on one connection to Ray: the cluster of ``RAY_ADDRESS``, or one started here and
    ended with it. A further attempt costs the start of its workers, not that of Ray."""

    def __init__(self, job: Job, experiment: Experiment) -> None:
        self._kind = "GPU" if job.use_gpu else "CPU"
        self._experiment = experiment
        self._connected = False
        self._tried = False

    def __enter__(self) -> RaySession:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(START_DEADLINE))
        # a failed worker is seen at its controller's next look
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        # Ray warns of a coming change in what a worker without a GPU sees; ours are told their device, and do not look
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect()

    def run(self, job: Job, experiment: Experiment, watch: Watch) -> None:
        """Runs one attempt. Raises the first SuiteError of a worker, DiedError for one that is gone, PlacementError
        when the cluster is away or too small, WorkerError otherwise."""
        import ray

        workers = len(watch.places)
        try:
            self._connect()
            if not self._tried:
                check_room(self._kind, workers, *_resources(ray))
            self._tried = True
            self._fit(_trainer(job, workers), watch)
        except Exception as error:
            raise self._first_cause(error, watch) from error

    def room(self, workers: int) -> int:
        """Returns how many devices are free, ``workers`` at most, having waited for so many for SPARE_S.

        Devices of a node that is gone and that Ray counts still are waited out: workers would be placed on them.
        """
        import ray

        until = time.monotonic() + SPARE_S
        while True:
            try:
                count, settled = self._count(ray)
            except SuiteError:
                raise
            except Exception as error:
                raise WorkerError(
                    f"Ray could not say which devices are left: {_first_line(error)}; see that its head runs, and "
                    "resume"
                ) from error
            if (count >= workers and settled) or time.monotonic() > until:
                return min(count, workers)
            time.sleep(0.25)

    def _count(self, ray: Any) -> tuple[int, bool]:
        """Returns the free devices of the nodes that answer, and whether those are all that Ray counts."""
        self._connect()
        alive = [node for node in ray.nodes() if node["Alive"]]
        there = [node for node in alive if _answers(node)]
        total = sum(node["Resources"].get(self._kind, 0) for node in there)
        _, free = _resources(ray)
        return int(min(total, free.get(self._kind, 0))), len(there) == len(alive)

    def _connect(self) -> None:
        if self._connected:
            return
        import ray

        on_terminate = signal.getsignal(signal.SIGTERM)
        workers = self._experiment.pipeline.stages * self._experiment.pipeline.replicas
        try:
            _connect(ray, workers, self._experiment)
        finally:
            signal.signal(signal.SIGTERM, on_terminate)  # Ray sets one that exits without a word
        self._connected = True

    def _disconnect(self) -> None:
        import ray

        ray.shutdown()
        self._connected = False

    def _fit(self, trainer: Any, watch: Watch) -> None:
        """Runs the trainer to its end, until this thread is interrupted, or until the watch has a verdict.

        In a thread of its own, because in the main one Ray Train answers an interrupt itself, by ending the process
        with exit code 0 and no word. Here the interrupt ends the wait, and the end of the session the workers.
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
            thread.join(0.25)
            if watch.verdict is not None and not failures:
                self._end(thread, watch.verdict)
                raise WorkerError("the workers were ended")
        if failures:
            raise failures[0]

    def _end(self, thread: threading.Thread, verdict: Verdict) -> None:
        """Ends an attempt that stands still: by the process that is to blame, or by the whole session.

        Raises DiedError where that process's machine is gone: one that loses its power says nothing, and Ray takes up
        to half a minute to see it.
        """
        beat = verdict.beat
        if beat is not None and beat.node and _node_lost(beat.node):
            self._disconnect()
            raise DiedError(verdict.place.rank, "its node is gone", "node")
        if beat is not None:
            _kill(beat)
            thread.join(END_S)
        if thread.is_alive():
            self._disconnect()

    def _first_cause(self, error: Exception, watch: Watch) -> SuiteError:
        """Returns what ended an attempt; a dead worker's node is looked up, for a lost machine is no fault of a
        program."""
        cause = first_cause(error)
        if not isinstance(cause, DiedError) or not self._connected:
            return cause
        beat = watch.beats.get(cause.rank)
        return DiedError(cause.rank, "its node is gone", "node") if beat and _node_lost(beat.node) else cause


def _trainer(job: Job, workers: int) -> Any:
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    config = {
        "folder": str(job.folder), "data": str(job.data), "cells": list(job.cells), "recipe": asdict(job.recipe),
        "use_gpu": job.use_gpu, "resume": job.resume, "attempt": job.attempt,
        "faults": job.faults, "step_s": job.step_s, "shrunk": job.shrunk,
    }  # fmt: skip
    return TorchTrainer(
        _loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if job.use_gpu else "gloo", timeout_s=int(job.timeout_s)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=job.use_gpu,
            resources_per_worker={"GPU": 1} if job.use_gpu else {"CPU": 1},
        ),
        run_config=ray.train.RunConfig(
            name=f"ray-train/{job.attempt}",
            storage_path=str(job.folder),
            # our supervisor decides what is tried again: Ray Train's retry cannot tell a bug from a lost machine that
            # it was not warned of, nor the same failure from another, nor plan for another K
            failure_config=ray.train.FailureConfig(
                max_failures=0,
                controller_failure_limit=0,  # type: ignore[call-arg]  # of Ray Train v2, whose types lag behind
                max_preemption_failures=0,
            ),
        ),
    )


def _node_lost(node: str) -> bool:
    """Whether a node is gone, be it that Ray has noticed or that it answers no more."""
    import ray

    known = [one for one in ray.nodes() if one["NodeID"] == node]  # type: ignore[no-untyped-call]
    return not any(one["Alive"] and _answers(one) for one in known)


def _answers(node: dict[str, Any]) -> bool:
    """Whether a node's own Ray process can be reached; Ray itself takes up to half a minute to give one up."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _kill(beat: Beat) -> None:
    """Ends a worker's process by SIGKILL, which ends a stopped one as well, from a task on its own node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def kill() -> None:
        os.kill(beat.pid, signal.SIGKILL)

    where = NodeAffinitySchedulingStrategy(beat.node, soft=False)
    try:
        ray.get(ray.remote(kill).options(num_cpus=0, scheduling_strategy=where, max_retries=0).remote(), timeout=END_S)
    except Exception as error:  # gone already, or its node does not answer either: then the session ends
        logging.getLogger(__name__).warning("could not end process %d: %s", beat.pid, error)


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
    import ray
    import ray.train

    from launch.worker import work

    cells = tuple(map(int, config["cells"]))
    recipe = Recipe(**config["recipe"] | {"graphs": tuple(map(int, config["recipe"]["graphs"]))})
    folder, data = Path(config["folder"]), Path(config["data"])
    job = Job(
        folder, data, cells, recipe, bool(config["use_gpu"]), bool(config["resume"]), int(config["attempt"]),
        str(config["faults"]), float(config["step_s"]), bool(config["shrunk"]),
    )  # fmt: skip
    work(job, ray.train.get_context().get_world_rank(), ray.get_runtime_context().get_node_id())


def first_cause(error: Exception) -> SuiteError:
    """Returns the first cause: what a worker says of itself, before the death of one, before others that only waited
    for it."""
    if isinstance(error, SuiteError):
        return error
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    causes = [(rank, _unwrap(failure)) for rank, failure in sorted(failures.items())]
    faults = [cause for _, cause in causes if isinstance(cause, SuiteError)]
    faults.sort(key=lambda fault: (isinstance(fault, StallError), isinstance(fault, NeighbourLostError)))
    others = [(rank, cause) for rank, cause in causes if not isinstance(cause, SuiteError)]
    if faults and not (others and isinstance(faults[0], StallError)):
        return faults[0]
    if not others:
        return WorkerError(f"Ray could not run the workers: {_first_line(_unwrap(error))}")
    rank, cause = others[0]
    if getattr(cause, "preempted", False):
        return DiedError(rank, "its node was taken back", "preemption")
    died = "Actor" in type(cause).__name__ or "Worker" in type(cause).__name__
    how = "its process ended (killed, or out of memory)" if died else f"{type(cause).__name__}: {_first_line(cause)}"
    return DiedError(rank, how)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unwrap(error: BaseException) -> BaseException:
    """Looks inside Ray's wrappers for the error that a worker raised."""
    for name in ("cause", "controller_failure", "_base_exc", "training_error", "__cause__"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException) and inner is not error:
            return _unwrap(inner)
    return error
