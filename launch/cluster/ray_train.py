"""Starts and supervises the K x R workers with Ray Train; no tensor of the training goes through Ray."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.experiment import Experiment
from launch.beats import Beat
from launch.cluster.causes import first_cause
from launch.cluster.connection import END_S, Connection, answering
from launch.cluster.mirror import Mirror
from launch.jobs import secrets
from launch.watch import Verdict, Watch
from launch.worker import Job, threads_of
from suite.errors import BusyError, DiedError, PlacementError, StallError, SuiteError, WorkerError
from suite.pipeline.placement import Placement, place, shortage
from suite.pipeline.recipe import Recipe

START_DEADLINE = 180
"""Seconds for all workers to be placed and started."""

SPARE_S = 20.0
"""Seconds for which lost devices are waited for before a run goes on with fewer, or ends."""

LOOK_S = 0.25
"""Between two looks at what is free."""


class RaySession:
    """A context in which attempts run on one connection to Ray. A further attempt costs the start of its workers, not
    that of Ray."""

    def __init__(
        self, connection: Connection, use_gpu: bool, planned: Placement | None, say: Callable[[str], None]
    ) -> None:
        """``say`` tells a person what is waited for, and where workers are placed that were ``planned`` elsewhere."""
        self._connection, self._say = connection, say
        self._kind = "GPU" if use_gpu else "CPU"
        self._patience = 0.0
        """Seconds for which the run waits for devices that others hold."""
        self._mirror: Mirror | None = None
        self._placed = planned.ids if planned is not None else []
        """The node of each rank, by its id."""

    def __enter__(self) -> RaySession:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(START_DEADLINE))
        # a failed worker is seen at its controller's next look
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def run(self, job: Job, experiment: Experiment, watch: Watch) -> None:
        """Runs one attempt. Raises the first SuiteError of a worker, DiedError for one that is gone, PlacementError
        when the cluster is away or too small, WorkerError otherwise."""
        pipeline = experiment.pipeline
        try:
            self._connection.open(len(watch.places))
            self._patience = experiment.train.wait_for_devices
            watch.held = True
            placement = self._place(pipeline.stages, pipeline.replicas)
            at_url = "://" in (experiment.train.checkpoints or "")
            with Mirror(job.folder, job.data, placement.nodes, at_url, self._say) as self._mirror:
                watch.held = False
                self._fit(_trainer(job, experiment, placement.ids), watch)
        except Exception as error:
            raise self._first_cause(error, watch) from error

    def room(self, workers: int) -> int:
        """Returns how many devices are free, ``workers`` at most, having waited for so many: for SPARE_S, and where
        there are so many and others hold them, as long as the run waits for devices.

        Devices of a node that is gone and that Ray counts still are waited out: workers would be placed on them.
        """
        begun = time.monotonic()
        while True:
            with answering("which devices are left"):
                nodes = self._connection.nodes(self._kind)
                settled = self._connection.settled(self._kind)
            count, total = sum(node.free for node in nodes), sum(node.total for node in nodes)
            patience = max(SPARE_S, self._patience) if total >= workers else SPARE_S
            if (count >= workers and settled) or time.monotonic() > begun + patience:
                return min(count, workers)
            time.sleep(LOOK_S)

    def _place(self, stages: int, replicas: int) -> Placement:
        """Returns where the workers go, having waited for devices that others hold. Raises PlacementError with what
        each node has when they stay away."""
        patience = self._patience
        until, told = time.monotonic() + patience, False
        while True:
            nodes = self._connection.nodes(self._kind)
            try:
                placement = place(nodes, stages, replicas)
            except PlacementError:
                lack = shortage(nodes, stages, replicas, self._kind)
                if time.monotonic() > until:
                    busy = sum(node.total for node in nodes) >= stages * replicas
                    raise (BusyError if busy else PlacementError)(
                        f"{lack}; waited {patience:.0f} s for them (train.wait_for_devices); lower pipeline.stages or "
                        "pipeline.replicas, or add nodes"
                    ) from None
                if not told:
                    self._say(f"{lack}; waiting for them, {patience:.0f} s at most")
                    told = True
                time.sleep(LOOK_S)
                continue
            if placement.ids != self._placed and len(nodes) > 1:
                for line in placement.lines():
                    self._say(line.strip())
            self._placed = placement.ids
            return placement

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
            finally:
                ended.set()

        # an event, for a thread whose join was interrupted passes for dead
        ended = threading.Event()
        threading.Thread(target=fit, daemon=True).start()
        try:
            while not ended.wait(LOOK_S):
                if watch.verdict is not None and not failures:
                    self._end(ended, watch.verdict, watch.beats)
                    raise WorkerError("the workers were ended")
        except KeyboardInterrupt:
            self._close(ended, at_once=False)
            raise
        if failures:
            raise failures[0]

    def _end(self, ended: threading.Event, verdict: Verdict, beats: Mapping[int, Beat]) -> None:
        """Ends an attempt that stands still: by the process that is to blame, or by the whole session.

        Raises DiedError where a machine is gone: one that loses its power says nothing, and Ray takes up to half a
        minute to see it. One that is cut off may still reach the run's folder, and beat; then all workers wait for one
        another, and the one that waits the longest may stand on another node.
        """
        beat, gone = verdict.beat, self._gone(beats, verdict.place.rank)
        if gone is not None:
            self._close(ended)
            raise DiedError(gone, "its node is gone", "node")
        if beat is not None:
            self._connection.kill(beat.node, beat.pid)
            ended.wait(END_S)
        if not ended.is_set():
            self._close(ended)

    def _close(self, ended: threading.Event, at_once: bool = True) -> None:
        """Ends the session, and before it what asks Ray from threads of their own: under one that waits for an answer
        Ray would end this whole process. What nodes apart wrote last is still carried here unless ``at_once``."""
        if self._mirror is not None:
            self._mirror.end(at_once)
        with suppress(Exception):  # a head that is gone has no controller to be ended
            self._connection.end_controller()
        ended.wait(END_S)
        self._connection.close()

    def _first_cause(self, error: Exception, watch: Watch) -> SuiteError:
        """Returns what ended an attempt; where a worker is dead or waited in vain, nodes are looked at, for a lost
        machine is no fault of a program."""
        cause = first_cause(error)
        if not isinstance(cause, DiedError | StallError) or not self._connection.connected:
            return cause
        gone = self._gone(watch.beats, cause.rank) if isinstance(cause, DiedError) else self._gone(watch.beats)
        return cause if gone is None else DiedError(gone, "its node is gone", "node")

    def _gone(self, beats: Mapping[int, Beat], first: int = 0) -> int | None:
        """Returns a rank whose node is gone, ``first`` if that one's is; None where all answer."""
        lost = {node: self._connection.lost(node) for node in {beat.node for beat in beats.values()} if node}
        ranks = sorted(beats, key=lambda rank: (rank != first, rank))
        return next((rank for rank in ranks if lost.get(beats[rank].node)), None)


def _trainer(job: Job, experiment: Experiment, nodes: Sequence[str]) -> Any:
    """Returns what runs an attempt's workers, each on its node; Ray Train's ranks are ours, for it counts them node by
    node in this order."""
    import ray.train
    from ray.train.torch import TorchTrainer

    from launch.cluster.meeting import Meeting

    config = {
        "folder": str(job.folder), "data": str(job.data), "cells": list(job.cells), "recipe": asdict(job.recipe),
        "use_gpu": job.use_gpu, "resume": job.resume, "attempt": job.attempt,
        "faults": job.faults, "step_s": job.step_s, "shrunk": job.shrunk,
    }  # fmt: skip
    return TorchTrainer(
        _loop,
        train_loop_config=config,
        torch_config=Meeting(backend="cpu:gloo,cuda:nccl" if job.use_gpu else "gloo", timeout_s=int(job.timeout_s)),
        scaling_config=ray.train.ScalingConfig(  # type: ignore[call-arg]
            num_workers=len(nodes),
            use_gpu=job.use_gpu,
            resources_per_worker={"GPU": 1} if job.use_gpu else {"CPU": 1},
            label_selector=[{"ray.io/node-id": node} for node in nodes],
        ),
        run_config=ray.train.RunConfig(
            name=f"ray-train/{job.attempt}",
            storage_path=str(job.folder),
            worker_runtime_env={
                "env_vars": {"OMP_NUM_THREADS": str(threads_of(experiment)), "TOKENIZERS_PARALLELISM": "false"}
            },
            # our supervisor decides what is tried again: Ray Train's retry cannot tell a bug from a lost machine that
            # it was not warned of, nor the same failure from another, nor plan for another K
            failure_config=ray.train.FailureConfig(
                max_failures=0,
                controller_failure_limit=0,  # type: ignore[call-arg]  # of Ray Train v2, whose types lag behind
                max_preemption_failures=0,
            ),
        ),
    )


def _loop(config: dict[str, Any]) -> None:
    """What Ray Train calls in each worker."""
    import ray
    import ray.train

    from launch.worker import work

    secrets.receive()
    cells = tuple(map(int, config["cells"]))
    recipe = Recipe(**config["recipe"] | {"graphs": tuple(map(int, config["recipe"]["graphs"]))})
    folder, data = Path(config["folder"]), Path(config["data"])
    job = Job(
        folder, data, cells, recipe, bool(config["use_gpu"]), bool(config["resume"]), int(config["attempt"]),
        str(config["faults"]), float(config["step_s"]), bool(config["shrunk"]),
    )  # fmt: skip
    work(job, ray.train.get_context().get_world_rank(), ray.get_runtime_context().get_node_id())
