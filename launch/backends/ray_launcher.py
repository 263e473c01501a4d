"""Runs attempts on a cluster's devices, by StageActors. Ray transfers no tensors of the training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from experiments.base.experiment import Experiment
from launch.backends.ray_connection import Connection, answering, wait_for_devices
from launch.backends.shared_folder import check_shared
from launch.backends.stage_actors import StageActors
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
    typed_line,
)
from suite.pipeline.planning.placement import Placement, place, shortage

MOST_LOSSES = 10
"""How often another run may take the chosen devices first."""


class RayLauncher:
    """A context in which attempts run over one connection to Ray. Attempts on the same devices reuse their
    StageActors: only the stage processes are forked anew."""

    def __init__(
        self, connection: Connection, attempt: Attempt, planned: Placement | None, log: Callable[[str], None]
    ) -> None:
        """``log`` receives what the run waits for, and the placement if it differs from ``planned``."""
        self._connection, self._log = connection, log
        self._kind = "GPU" if attempt.use_gpu else "CPU"
        self._device_timeout_s = 0.0
        """Seconds to wait for devices."""
        self._actors: StageActors | None = None
        self._checked = set[str]()
        """Ids of nodes that see the run's folder."""
        self._node_ids = planned.ids if planned is not None else []
        """Node id of each rank."""

    def __enter__(self) -> RayLauncher:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def run(self, attempt: Attempt, experiment: Experiment, watchdog: Watchdog) -> None:
        """Runs one attempt. Raises the first SuiteError of a worker, WorkerDiedError if a worker died, PlacementError
        if the cluster does not answer or is too small, WorkerError otherwise."""
        try:
            self._connection.open()
            self._device_timeout_s = experiment.train.device_timeout_s
            watchdog.paused = True
            actors = self._actors_for(attempt, experiment)
            actors.begin(attempt)
            watchdog.paused = False
            _wait_for_workers(actors, watchdog)
        except Exception as error:
            raise self._handle_failure(error, watchdog) from error
        self._release()

    def _actors_for(self, attempt: Attempt, experiment: Experiment) -> StageActors:
        """Returns the previous attempt's actors if they can be reused, otherwise new ones, with their devices."""
        if self._can_reuse_actors(attempt.workers):
            assert self._actors is not None
            return self._actors
        for _ in range(MOST_LOSSES):
            self._release()
            placement = self._place(experiment.pipeline.stages, experiment.pipeline.replicas)
            self._check_folders(attempt, experiment, placement)
            self._actors = StageActors(placement.ids, self._kind, experiment.train.threads)
            if self._actors.has_devices():
                return self._actors
            free = {node.id: node.free for node in self._connection.nodes(self._kind)}
            taken = any(count > free.get(node, 0) for node, count in Counter(placement.ids).items())
            why = "others have them now" if taken else "although they are free"
            self._log(f"Ray did not give these devices in {self._actors.hold_s:.0f} s, {why}; choosing again")
        self._release()
        raise BusyError(f"Ray did not give this run its devices {MOST_LOSSES} times, {why}; start it again")

    def _check_folders(self, attempt: Attempt, experiment: Experiment, placement: Placement) -> None:
        """Raises PlacementError for a node that does not see the run's folders. Asks each node once."""
        new = [node for node in placement.nodes if node.id not in self._checked]
        checkpoints = folder_of(checkpoint_location(attempt.run, experiment))
        check_shared(new, [attempt.folder, *([Path(checkpoints)] if checkpoints else [])], attempt.data)
        self._checked.update(placement.ids)

    def _can_reuse_actors(self, workers: int) -> bool:
        return self._actors is not None and self._actors.usable and self._actors.workers == workers

    def _release(self) -> None:
        """Ends the actors."""
        if self._actors is not None:
            self._actors.end()
        self._actors = None

    def available_devices(self, workers: int) -> int:
        """Returns how many devices are free, at most ``workers``. Waits for that many, as long as
        ``train.device_timeout_s``: for lost nodes to be replaced, or others to end; and for nodes that do not answer,
        of which Ray may not know yet that they are lost.

        Devices of this run's own actors count. They stay if they can be reused, or if the run is on fewer devices
        already and no others have become free; otherwise they are released first.
        """
        if self._can_reuse_actors(workers):
            return workers
        if self._actors is not None and self._actors.usable and self._actors.workers < workers:
            with answering("which devices are free"):
                free = sum(node.free for node in self._connection.nodes(self._kind))
            if free + self._actors.workers < workers:
                return self._actors.workers
        self._release()
        free = 0

        def find() -> None:
            nonlocal free
            with answering("which devices are left"):
                nodes, silent = self._connection.nodes_and_silent(self._kind)
            free = min(workers, sum(node.free for node in nodes))
            if free < workers or silent:
                unanswered = f", and {len(silent)} nodes do not answer" if silent else ""
                raise BusyError(f"{free} of {workers} devices are free{unanswered}")

        with suppress(BusyError):
            wait_for_devices(find, self._device_timeout_s, self._log, "")
        return free

    def leave_out(self, rank: int) -> str:
        """Places the next attempt without the node of a worker, and returns the node's name; empty if the others have
        too few free devices."""
        own, workers = self._node_ids[rank], len(self._node_ids)
        try:
            nodes = self._connection.nodes(self._kind)
        except Exception:  # of many types: raised by Ray
            return ""
        others = sum(node.free + self._node_ids.count(node.id) for node in nodes if node.id != own)
        if others < workers:
            return ""
        name = next((node.name for node in nodes if node.id == own), own)
        self._release()
        self._connection.left_out[own] = f"{name}, where workers failed twice"
        return name

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
        """Ends the session, and with it the actors."""
        self._actors = None
        self._connection.close()

    def _handle_failure(self, error: Exception, watchdog: Watchdog) -> SuiteError:
        """Ends all workers of a failed attempt, and returns the root cause. The actors end their workers; if a node is
        lost, the whole session is closed.

        If a worker is dead, stalled or timed out, checks whether a node is lost, since that is not the program's fault.
        Ray needs up to half a minute to notice a machine without power. A machine cut off from the others may still
        reach this one; then all workers wait for one another, and the one that waits longest may be on another node.
        """
        cause = error
        if not isinstance(cause, SuiteError):
            cause = WorkerError(f"Ray could not run the workers: {typed_line(error)}")
        lost_rank, heartbeats, verdict = None, watchdog.heartbeats, watchdog.verdict
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
        """Ends the workers of an attempt; returns whether their nodes and Ray answer."""
        try:
            late = self._actors.stop() if self._actors is not None else set()
            return not late or not self._connection.lost_nodes(late)
        except Exception:  # of many types: raised by Ray
            return False


def _wait_for_workers(actors: StageActors, watchdog: Watchdog) -> None:
    """Returns when all workers have finished the job. Raises the root cause if one failed, WorkerError if the watchdog
    has a verdict."""
    finished, is_asked = 0, False
    while finished < actors.workers:
        heartbeats, ended = actors.receive()
        watchdog.receive(heartbeats)
        if failures := [error for error in ended.values() if error is not None]:
            # a worker delays its report of a lost peer, so that the peer's own failure comes first
            raise min(failures, key=lambda error: (isinstance(error, PeerLostError), isinstance(error, StallError)))
        finished += len(ended)
        if watchdog.should_stop:
            raise WorkerError("the workers were ended")
        if watchdog.ends_early.is_set() and not is_asked:
            actors.end_early()
            is_asked = True
