"""Classifies why an attempt ended, and decides whether to start another one.

kind         cause                                                             another attempt?
user         settings, data, a checkpoint, non-finite numbers                  no: it would fail again
program      an exception in a worker: a bug, or a flaky device                unless it comes twice in a row *
death        a process died without a report                                   unless it comes twice in a row *
stall        a worker blocks all others                                        unless it comes twice in a row *
start        the workers could not be started, or storage did not answer       unless it comes twice in a row *
node         a machine is lost, with its processes                             yes, counted by itself
preemption   a machine was preempted                                           yes, counted by itself

* The second time, the node of the failed worker is left out if others have free devices; the third failure is the last.
  The first node is also left out after two exceptions in a row on it that differ: a flaky device fails at any place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launch.runs.store import RunFolder
from launch.supervision.watchdog import Watchdog
from launch.worker.heartbeat import Heartbeat
from suite.errors import (
    ForkserverError,
    ProgramError,
    StallError,
    StorageError,
    SuiteError,
    WorkerDiedError,
    WorkerError,
)
from suite.pipeline.model.topology import RankCoord

FailureKind = Literal["user", "program", "death", "stall", "start", "node", "preemption"]

SAME_FAILURE = "the same failure occurred twice in a row in the same place"
SAME_NODE = "the last two exceptions were on the same node"

LOST_WORKER: tuple[FailureKind, ...] = ("node", "preemption")


@dataclass(frozen=True)
class Cause:
    """The root cause of a failed attempt."""

    kind: FailureKind
    message: str
    """One sentence; for a stall followed by the state of each stage."""
    error_type: str = ""
    replica: int | None = None
    stage: int | None = None
    step: int | None = None
    action: str | None = None
    layer: int | None = None
    host: str = ""
    node: str = ""
    log: str = ""

    def same(self, other: Cause) -> bool:
        """Whether both are the same failure in the same place. For an exception the micro-batch does not matter; a
        stall without a known place never matches."""
        if self.kind in LOST_WORKER or (self.kind == "stall" and self.action is None):
            return False
        if self.kind == "start" and self.stage is None:
            return other.kind == "start" and self.message == other.message

        def place(cause: Cause) -> tuple[object, ...]:
            action = cause.action[:1] if cause.kind == "program" and cause.action else cause.action
            return cause.kind, cause.error_type, cause.replica, cause.stage, cause.step, action

        return place(self) == place(other)


def on_same_node(causes: Sequence[Cause]) -> bool:
    """Whether the last two failures were exceptions on one node."""
    last = causes[-2:]
    where = {(cause.host, cause.node) for cause in last}
    return len(last) == 2 and len(where) == 1 and all(cause.kind == "program" for cause in last)


def find_cause(error: SuiteError, run: RunFolder, watchdog: Watchdog) -> Cause:
    """Returns the root cause of a failed attempt. The watchdog's verdict takes precedence, because a stall causes
    further errors; an exception in a worker, which says more, and a lost machine override it."""
    verdict = watchdog.verdict
    lost = isinstance(error, WorkerDiedError) and error.kind in LOST_WORKER
    if verdict is not None and not lost and not isinstance(error, ProgramError):
        log = str(run.log(verdict.coord.replica, verdict.coord.stage))
        message = f"{verdict.message}; its log is {log}\n{watchdog.stall_report()}"
        return _last_seen(verdict.coord, verdict.heartbeat, log, "stall", message)
    if isinstance(error, ProgramError):
        at = error.where
        heartbeat = watchdog.heartbeats.get(watchdog.coords[0].rank_of(at.replica, at.stage))
        node = heartbeat.node if heartbeat else ""
        return Cause(
            "program", str(error), error.what, at.replica, at.stage, at.step, at.action, at.layer, at.host, node, at.log
        )
    if isinstance(error, WorkerDiedError):
        return _death(error, run, watchdog)
    if isinstance(error, ForkserverError):
        return Cause("death", str(error), type(error).__name__, step=watchdog.last_step)
    if isinstance(error, StallError):
        return Cause("stall", f"{error}\n{watchdog.stall_report()}", type(error).__name__)
    if isinstance(error, (WorkerError, StorageError)):
        return Cause("start", str(error), type(error).__name__)
    return Cause("user", str(error), type(error).__name__)


def _death(error: WorkerDiedError, run: RunFolder, watchdog: Watchdog) -> Cause:
    coord, heartbeat = watchdog.coords[error.rank], watchdog.heartbeats.get(error.rank)
    log = str(run.log(coord.replica, coord.stage))
    host = f" on {heartbeat.host}" if heartbeat else ""
    seen = f", last seen at {heartbeat.at}" if heartbeat else " before its first heartbeat"
    message = f"{coord}{host}: {error.how}{seen}; its log is {log}"
    return _last_seen(coord, heartbeat, log, error.kind, message, error.how)


def _last_seen(
    coord: RankCoord, heartbeat: Heartbeat | None, log: str, kind: FailureKind, message: str, error_type: str = ""
) -> Cause:
    """Returns the cause with the place where its worker was last seen."""
    if heartbeat is None:
        return Cause(kind, message, error_type, coord.replica, coord.stage, log=log)
    place = heartbeat.step, heartbeat.action, heartbeat.layer, heartbeat.host, heartbeat.node
    return Cause(kind, message, error_type, coord.replica, coord.stage, *place, log)


def reason_to_stop(causes: Sequence[Cause], since_checkpoint: int, max_restarts: int) -> str | None:
    """Returns why there should be no further attempt, or None. ``causes`` are those of all attempts, the last
    ``since_checkpoint`` of them since the last new checkpoint. ``max_restarts`` limits lost machines and all other
    failures separately."""
    last = causes[-1]
    if last.kind == "user":
        return "another attempt would not fix it"
    if len(causes) > 1 and last.same(causes[-2]):
        return SAME_FAILURE
    lost = last.kind in LOST_WORKER
    count = sum((cause.kind in LOST_WORKER) == lost for cause in causes[-since_checkpoint:])
    if count > max_restarts:
        failures = "lost machines" if lost else "failures"
        return f"{count} {failures} without a new checkpoint, train.max_restarts allows {max_restarts}"
    return None
