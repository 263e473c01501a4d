"""Runs attempts on the devices of a cluster, by agents that Ray Train starts; no tensor of the training goes through
Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType

from experiments.experiment import Experiment
from launch.beats import Beat
from launch.checkpoints import place_of
from launch.cluster.agents import LOOK_S, START_DEADLINE, Agents
from launch.cluster.causes import first_cause
from launch.cluster.connection import Connection, answering
from launch.cluster.mirror import Mirror
from launch.watch import Watch
from launch.worker import Job
from suite.errors import BusyError, DiedError, NeighbourLostError, PlacementError, StallError, SuiteError, WorkerError
from suite.pipeline.placement import Placement, place, shortage

SPARE_S = 20.0
"""Seconds for which lost devices are waited for before a run goes on with fewer, or ends."""


class RaySession:
    """A context in which attempts run on one connection to Ray. Where the devices stay, a further attempt costs the
    fork of its workers, not the start of Ray's processes."""

    def __init__(
        self, connection: Connection, use_gpu: bool, planned: Placement | None, say: Callable[[str], None]
    ) -> None:
        """``say`` tells a person what is waited for, and where workers are placed that were ``planned`` elsewhere."""
        self._connection, self._say = connection, say
        self._kind = "GPU" if use_gpu else "CPU"
        self._patience = 0.0
        """Seconds for which the run waits for devices that others hold."""
        self._mirror: Mirror | None = None
        self._agents: Agents | None = None
        self._apart: set[str] = set()
        """The ids of nodes that do not share the run's folder: looked at with patience once, not at each attempt."""
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
        self._close(at_once=False)

    def run(self, job: Job, experiment: Experiment, watch: Watch) -> None:
        """Runs one attempt. Raises the first SuiteError of a worker, DiedError for one that is gone, PlacementError
        when the cluster is away or too small, WorkerError otherwise."""
        try:
            self._connection.open(len(watch.places))
            self._patience = experiment.train.wait_for_devices
            watch.held = True
            agents = self._agents_for(job, experiment)
            watch.held = False
            agents.begin(job)
            _follow(agents, watch)
        except Exception as error:
            raise self._first_cause(error, watch) from error
        self._let_go()

    def _agents_for(self, job: Job, experiment: Experiment) -> Agents:
        """Returns the agents of the attempt before, if they are as many as are needed and their files arrive;
        otherwise new ones."""
        pipeline = experiment.pipeline
        if self._has(pipeline.stages * pipeline.replicas):
            assert self._agents is not None
            return self._agents
        self._let_go()
        placement = self._place(pipeline.stages, pipeline.replicas)
        checkpoints = place_of(job.run, experiment)
        self._mirror = Mirror(job.folder, job.data, placement.nodes, checkpoints, self._apart, self._say)
        self._mirror.__enter__()
        self._agents = Agents(job, experiment, placement.ids)
        return self._agents

    def _has(self, workers: int) -> bool:
        """Whether there are so many agents, and the files of all their nodes arrive: without its heartbeats a node's
        worker would pass for one that stands still, at every attempt."""
        agents, mirror = self._agents, self._mirror
        if agents is None or mirror is None:
            return False
        return agents.alive and agents.workers == workers and mirror.whole

    def _let_go(self) -> None:
        """Has agents end, and what nodes apart wrote last carried here."""
        if self._mirror is not None:
            self._mirror.end()
        if self._agents is not None:
            self._agents.end()
        self._mirror = self._agents = None

    def room(self, workers: int) -> int:
        """Returns how many devices are free, ``workers`` at most, having waited for so many: for SPARE_S, and where
        there are so many and others hold them, as long as the run waits for devices.

        Those of this run's own agents count where they are as many as are needed; otherwise they are let go of first.
        Devices of a node that is gone and that Ray counts still are waited out: workers would be placed on them.
        """
        if self._has(workers):
            return workers
        self._let_go()
        begun = time.monotonic()
        while True:
            with answering("which devices are left"):
                nodes, silent = self._connection.nodes_and_silent(self._kind)
            count, total = sum(node.free for node in nodes), sum(node.total for node in nodes)
            patience = max(SPARE_S, self._patience) if total >= workers else SPARE_S
            if (count >= workers and not silent) or time.monotonic() > begun + patience:
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

    def _close(self, at_once: bool = True) -> None:
        """Ends the session, and before it what asks Ray from threads of their own: under one that waits for an answer
        Ray would end this whole process. What nodes apart wrote last is still carried here unless ``at_once``."""
        if self._mirror is not None:
            self._mirror.end(at_once)
        if self._agents is not None:
            with suppress(Exception):  # a head that is gone has no controller to be ended
                self._connection.end_controller()
            self._agents.wait()
        self._mirror = self._agents = None
        self._connection.close()

    def _first_cause(self, error: Exception, watch: Watch) -> SuiteError:
        """Returns what ended an attempt, with all its workers ended: by their agents, or where one does not answer or a
        machine is gone by the end of the session.

        Where a worker is dead, stands still or waited in vain, nodes are looked at, for a lost machine is no fault of a
        program. One that loses its power says nothing, and Ray takes up to half a minute to see it. One that is cut off
        may still reach the run's folder, and beat; then all workers wait for one another, and the one that waits the
        longest may stand on another node.
        """
        cause, gone = first_cause(error), None
        if self._connection.connected and (watch.verdict is not None or isinstance(cause, DiedError | StallError)):
            died = cause.rank if isinstance(cause, DiedError) else 0
            gone = self._gone(watch.beats, watch.verdict.place.rank if watch.verdict is not None else died)
        if gone is not None or not self._stopped():
            self._close()
        return cause if gone is None else DiedError(gone, "its node is gone", "node")

    def _stopped(self) -> bool:
        """Has the workers of an attempt ended; returns whether they are, and Ray answers."""
        if self._agents is None or not self._agents.alive:
            return True
        try:
            return self._agents.stop()
        except Exception:  # of many types: what ended the agents, or Ray
            return not self._agents.alive

    def _gone(self, beats: Mapping[int, Beat], first: int = 0) -> int | None:
        """Returns a rank whose node is gone, ``first`` if that one's is; None where all answer."""
        lost = self._connection.lost({beat.node for beat in beats.values()} - {""})
        ranks = sorted(beats, key=lambda rank: (rank != first, rank))
        return next((rank for rank in ranks if beats[rank].node in lost), None)


def _follow(agents: Agents, watch: Watch) -> None:
    """Returns when all workers came to the end of the job. Raises the first cause where one did not, WorkerError once
    the watch has a verdict."""
    while True:
        reports = agents.reports()
        failures = [report for report in reports.values() if report is not None]
        if len(reports) == agents.workers and not failures:
            return
        if failures:
            # an agent holds back for a while that its worker lost another: what happened to that one comes first
            raise min(failures, key=lambda one: (isinstance(one, NeighbourLostError), isinstance(one, StallError)))
        if watch.ends:
            raise WorkerError("the workers were ended")
