"""Runs attempts on a cluster's devices, with agents that Ray Train starts. Ray transfers no tensors of the training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from experiments.base.experiment import Experiment
from launch.backends.ray_agent_group import AgentGroup
from launch.backends.ray_connection import POLL_S, Connection, answering, wait_for_devices
from launch.backends.shared_folder import check_shared
from launch.node_probe import folder_of
from launch.runs.checkpoints import checkpoint_location
from launch.supervision.watchdog import Watchdog
from launch.worker.attempt import Attempt
from suite.errors import (
    BusyError,
    PeerLostError,
    PlacementError,
    StallError,
    SuiteError,
    WorkerDiedError,
    WorkerError,
    first_line,
)
from suite.pipeline.planning.placement import Placement, place, shortage

HOLD_S, MOST_LOSSES = 15, 10
"""Seconds for Ray to give this run the devices that it chose; how often another run may take them first. Two runs that
start at the same moment see the same free devices."""

SPARE_NODE_TIMEOUT_S = 20.0
"""Seconds to wait for a replacement of lost devices before a run continues with fewer, or ends."""


class RayTrainLauncher:
    """A context in which attempts run over one connection to Ray. Attempts on the same devices reuse their Ray
    processes: only the workers are forked anew."""

    def __init__(
        self, connection: Connection, attempt: Attempt, planned: Placement | None, log: Callable[[str], None]
    ) -> None:
        """``log`` receives what the run waits for, and the placement if it differs from ``planned``."""
        self._connection, self._log = connection, log
        self._kind = "GPU" if attempt.use_gpu else "CPU"
        self._device_timeout_s = 0.0
        """Seconds to wait for busy devices."""
        self._agents: AgentGroup | None = None
        self._checked = set[str]()
        """Ids of nodes that see the run's folder."""
        self._node_ids = planned.ids if planned is not None else []
        """Node id of each rank."""

    def __enter__(self) -> RayTrainLauncher:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(HOLD_S))
        # the controller detects a failed worker at its next health check
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def run(self, attempt: Attempt, experiment: Experiment, watchdog: Watchdog) -> None:
        """Runs one attempt. Raises the first SuiteError of a worker, WorkerDiedError if a worker died, PlacementError
        if the cluster does not answer or is too small, WorkerError otherwise."""
        try:
            self._connection.open()
            self._device_timeout_s = experiment.train.device_timeout_s
            for _ in range(MOST_LOSSES):
                if self._has_run(attempt, experiment, watchdog):
                    break
                self._log(f"Ray did not give these devices in {HOLD_S} s, others may have them now; choosing again")
            else:
                raise BusyError(f"others took the devices {MOST_LOSSES} times before this run; start it again")
        except Exception as error:
            raise self._handle_failure(error, watchdog) from error
        self._release()

    def _has_run(self, attempt: Attempt, experiment: Experiment, watchdog: Watchdog) -> bool:
        """Runs an attempt; returns False if Ray did not give it the devices. Raises what a worker does."""
        from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

        watchdog.paused = True
        agents = self._agents_for(attempt, experiment)
        watchdog.paused = False
        agents.begin(attempt, watchdog)
        try:
            _wait_for_workers(agents, watchdog)
        except Exception as error:
            if not isinstance(_unwrap(error), WorkerGroupStartupTimeoutError):
                raise
            return False
        return True

    def _agents_for(self, attempt: Attempt, experiment: Experiment) -> AgentGroup:
        """Returns the previous attempt's agents if they can be reused, otherwise new ones."""
        if self._can_reuse_agents(attempt.workers):
            assert self._agents is not None
            return self._agents
        self._release()
        placement = self._place(experiment.pipeline.stages, experiment.pipeline.replicas)
        new = [node for node in placement.nodes if node.id not in self._checked]
        checkpoints = folder_of(checkpoint_location(attempt.run, experiment))
        check_shared(new, [attempt.folder, *([Path(checkpoints)] if checkpoints else [])], attempt.data)
        self._checked.update(placement.ids)
        self._agents = AgentGroup(attempt, experiment, placement.ids)
        return self._agents

    def _can_reuse_agents(self, workers: int) -> bool:
        return self._agents is not None and self._agents.alive and self._agents.workers == workers

    def _release(self) -> None:
        """Ends the agents."""
        if self._agents is not None:
            self._agents.end()
        self._agents = None

    def available_devices(self, workers: int) -> int:
        """Returns how many devices are free, at most ``workers``. Waits for that many: SPARE_NODE_TIMEOUT_S, or
        ``train.device_timeout_s`` if the cluster has enough devices and they are busy.

        Devices of this run's own agents count if the agents can be reused; otherwise the agents are released first.
        Waits until Ray has noticed lost nodes: it would place workers on them.
        """
        if self._can_reuse_agents(workers):
            return workers
        self._release()
        start = time.monotonic()
        while True:
            with answering("which devices are left"):
                nodes, silent = self._connection.nodes_and_silent(self._kind)
            free, total = sum(node.free for node in nodes), sum(node.total for node in nodes)
            timeout_s = max(SPARE_NODE_TIMEOUT_S, self._device_timeout_s) if total >= workers else SPARE_NODE_TIMEOUT_S
            if (free >= workers and not silent) or time.monotonic() > start + timeout_s:
                return min(free, workers)
            time.sleep(POLL_S)

    def _place(self, stages: int, replicas: int) -> Placement:
        """Returns the placement of the workers; waits for busy devices. Raises PlacementError with the devices of each
        node if they do not become free in time."""

        def find() -> tuple[Placement, int]:
            nodes = self._connection.nodes(self._kind)
            try:
                return place(nodes, stages, replicas), len(nodes)
            except PlacementError:
                busy = sum(node.total for node in nodes) >= stages * replicas
                missing = shortage(nodes, stages, replicas, self._kind)
                raise (BusyError if busy else PlacementError)(missing) from None

        remedy = " (train.device_timeout_s); lower pipeline.stages or pipeline.replicas, or add nodes"
        placement, count = wait_for_devices(find, self._device_timeout_s, self._log, remedy)
        if placement.ids != self._node_ids and count > 1:
            for line in placement.lines():
                self._log(line.strip())
        self._node_ids = placement.ids
        return placement

    def _close(self) -> None:
        """Ends the session. First ends the thread that calls Ray: if it still waits for an answer when Ray shuts down,
        Ray ends the whole process."""
        if self._agents is not None:
            with suppress(Exception):  # if the head is lost, there is no controller
                self._connection.end_controller()
            self._agents.wait()
        self._agents = None
        self._connection.close()

    def _handle_failure(self, error: Exception, watchdog: Watchdog) -> SuiteError:
        """Ends all workers of a failed attempt, and returns the root cause. The agents end the workers; if an agent
        does not answer or a node is lost, the whole session is closed.

        If a worker is dead, stalled or timed out, checks whether a node is lost, since that is not the program's fault.
        Ray needs up to half a minute to notice a machine without power. A machine cut off from the others may still
        reach this one; then all workers wait for one another, and the one that waits longest may be on another node.
        """
        cause, lost_rank, heartbeats = root_cause(error), None, watchdog.heartbeats
        verdict = watchdog.verdict
        if self._connection.connected and (verdict is not None or isinstance(cause, WorkerDiedError | StallError)):
            died = cause.rank if isinstance(cause, WorkerDiedError) else 0
            likely = verdict.coord.rank if verdict is not None else died
            lost = self._connection.lost_nodes({heartbeat.node for heartbeat in heartbeats.values()} - {""})
            on_lost_nodes = [rank for rank, heartbeat in heartbeats.items() if heartbeat.node in lost]
            lost_rank = min(on_lost_nodes, key=lambda rank: (rank != likely, rank), default=None)
        if lost_rank is not None or not self._stop_workers():
            self._close()
        return cause if lost_rank is None else WorkerDiedError(lost_rank, "its node is lost", "node")

    def _stop_workers(self) -> bool:
        """Ends the workers of an attempt; returns whether they have ended and Ray answers."""
        if self._agents is None or not self._agents.alive:
            return True
        try:
            return self._agents.stop()
        except Exception:  # of many types: raised by Ray, or the error that ended the agents
            return not self._agents.alive


def _wait_for_workers(agents: AgentGroup, watchdog: Watchdog) -> None:
    """Returns when all workers have finished the job. Raises the root cause if one failed, WorkerError if the watchdog
    has a verdict."""
    while True:
        reports = agents.reports()
        failures = [report for report in reports.values() if report is not None]
        if len(reports) == agents.workers and not failures:
            return
        if failures:
            # a worker delays its report of a lost peer, so that the peer's own failure comes first
            raise min(failures, key=lambda error: (isinstance(error, PeerLostError), isinstance(error, StallError)))
        if watchdog.should_stop:
            raise WorkerError("the workers were ended")


def root_cause(error: Exception) -> SuiteError:
    """Returns the error of a failed attempt: what a worker reported, or why Ray Train's agents ended."""
    if isinstance(error, SuiteError):
        return error
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    if not failures:
        return WorkerError(f"Ray could not run the workers: {first_line(_unwrap(error))}")
    rank = min(failures)
    cause = _unwrap(failures[rank])
    if getattr(cause, "preempted", False):
        return WorkerDiedError(rank, "its node was preempted", "preemption")
    died = "Actor" in type(cause).__name__ or "Worker" in type(cause).__name__
    how = "its process ended (killed, or out of memory)" if died else f"{type(cause).__name__}: {first_line(cause)}"
    return WorkerDiedError(rank, how)


def _unwrap(error: BaseException) -> BaseException:
    """Returns the worker's exception inside Ray's wrapper exceptions."""
    for name in ("cause", "controller_failure", "_base_exc", "training_error", "__cause__"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException) and inner is not error:
            return _unwrap(inner)
    return error
