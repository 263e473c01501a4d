"""Heartbeats: each worker writes its status to a small file on its own machine.

worker   0-2.json (replica 0, stage 2) ---+--> watchdog, in the driver --> runs/<name>/<id>/heartbeats.json --> watch
actor    sends it where Ray starts workers +

The file is rewritten every second and at every action, in some 20 microseconds, so the last action of a killed process
is known. It lies in a temporary folder, not in the run's: a thousand small files on a network file system take seconds
to read.

A suspended process sends no heartbeats. One that is stuck in a layer sends them, but its action does not change. While
a host runs ahead of its GPU, the heartbeat says where the GPU is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from pydantic import TypeAdapter

from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.training.periodic import PeriodicThread

PERIOD_S = 1.0

WAIT_S = 0.1
"""Seconds that a heartbeat waits for another one that is being written."""

_SIZE = 1024
"""Bytes of the file."""

ENDED = ("failed", "finished")
"""Actions of a worker that has ended."""


@dataclass(frozen=True)
class Heartbeat:
    """The last known status of a worker."""

    replica: int
    stage: int
    attempt: int
    pid: int
    host: str
    node: str
    """Ray's id of the node; empty without Ray."""
    number: int
    """Increases with every heartbeat."""
    actions_begun: int
    action: str
    step: int | None
    first_step: int | None
    steps_done: int
    """In this attempt."""
    layer: int | None
    waiting: str
    """What the worker waits for; empty if it does not wait."""
    elapsed_s: float
    """Duration of the current action or wait, by the worker's own clock."""
    current_timeout_s: float
    """Limit of ``elapsed_s``."""
    action_timeout_s: float
    """Limit for one action, except for waits of all workers for one another."""

    @property
    def at(self) -> str:
        """Where in the run it was."""
        layer = f" in layer {self.layer}" if self.layer is not None else ""
        return self.action + layer + (f" of step {self.step + 1}" if self.step is not None else "")


_HEARTBEAT = TypeAdapter(Heartbeat)
_HEARTBEATS = TypeAdapter(list[Heartbeat])


class HeartbeatWriter:
    """A context in which a worker's heartbeats are written: by a thread, and at every action. A failure to write one
    is reported in the worker's log, once; the watchdog finds a worker silent that writes none. One that hangs, in a
    disk or a driver, delays the training by ``WAIT_S`` at each action."""

    def __init__(self, folder: Path, coord: RankCoord, attempt: int, status: WorkerStatus, node: str = "") -> None:
        self._path, self._status = path_of(folder, coord.replica, coord.stage), status
        self._worker = coord.replica, coord.stage, attempt, os.getpid(), socket.gethostname(), node
        self._number, self._writing = 0, Lock()
        self._thread = PeriodicThread(self._write_heartbeat, PERIOD_S, "heartbeats")

    def __enter__(self) -> HeartbeatWriter:
        self._thread.call()
        self._status.on_change = self._thread.call
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.end()
        self._status.action = "failed" if error is not None else "finished"
        self._status.device_marks.clear()
        self._thread.call()

    def current(self) -> Heartbeat:
        """Returns the worker's status: where its device is, or its host if the device has done all that it got."""
        status = self._status
        heartbeat = Heartbeat(
            *self._worker,
            self._number,
            status.actions_begun,
            str(status.action),
            status.step,
            status.first_step,
            status.steps_done,
            status.layer,
            status.waiting,
            status.elapsed_s,
            status.current_timeout_s,
            status.action_timeout_s,
        )
        if (on_device := status.on_device()) is None:
            return heartbeat
        mark, elapsed_s = on_device
        return replace(heartbeat, action=str(mark.action), layer=None, waiting=mark.waiting, elapsed_s=elapsed_s)

    def _write_heartbeat(self) -> None:
        if not self._writing.acquire(timeout=WAIT_S):
            return
        try:
            self._number += 1
            # overwritten in place with a fixed size, because that still works on a full disk
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, _HEARTBEAT.dump_json(self.current()).ljust(_SIZE), 0)
            finally:
                os.close(file)
        finally:
            self._writing.release()


def path_of(folder: Path, replica: int, stage: int) -> Path:
    return folder / f"{replica}-{stage}.json"


def read_heartbeat(folder: Path, replica: int, stage: int, attempt: int) -> Heartbeat | None:
    """Returns the latest heartbeat of an attempt's worker; None if there is none or it is only partly written."""
    try:
        return parse_heartbeat(path_of(folder, replica, stage).read_bytes(), attempt)
    except OSError:
        return None


def parse_heartbeat(data: bytes, attempt: int) -> Heartbeat | None:
    """Returns the heartbeat in the bytes of a worker's file; None if it is of another attempt or damaged."""
    try:
        heartbeat = _HEARTBEAT.validate_json(data)
    except ValueError:
        return None
    return heartbeat if heartbeat.attempt == attempt else None


def write_heartbeats(path: Path, heartbeats: Iterable[Heartbeat]) -> None:
    """Writes the latest heartbeats of all workers to one file. Raises OSError."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(_HEARTBEATS.dump_json(list(heartbeats)))  # not synced: it is of no use after a power cut
    draft.replace(path)


def read_heartbeats(path: Path, attempt: int) -> list[Heartbeat]:
    """Returns the latest heartbeats of an attempt's workers; an empty list without a readable file."""
    try:
        heartbeats = _HEARTBEATS.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return []
    return [heartbeat for heartbeat in heartbeats if heartbeat.attempt == attempt]
