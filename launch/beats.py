"""Signs of life: each worker keeps one small file that says what it is doing.

It is written anew every second. Beyond that the present turn stands in a part of the file that is mapped into memory:
a process that is killed has said where it was, at no cost worth a name.

    runs/<name>/<id>/beats/0-2.json     replica 0, stage 2: process, node, step, action, since when, what it waits for

A stopped process falls silent; one that is stuck in a layer beats on, and its turn does not change.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter

from suite.pipeline.doing import Doing
from suite.pipeline.topology import Place
from suite.training.recurring import Recurring

PERIOD = 1.0
_SIZE = 1024
_PRESENT = struct.Struct("<qqqqqd16s")
"""Attempt, turns, step and first step (-1 for none), steps done, how long an action may last, the action. It stands
behind the text."""

ENDED = ("failed", "gone")
"""What a worker does that will do nothing more."""


@dataclass(frozen=True)
class Beat:
    """What one worker said last."""

    replica: int
    stage: int
    attempt: int
    pid: int
    host: str
    node: str
    """Ray's name of the node; empty without Ray."""
    number: int
    """Grows with every beat."""
    turns: int
    what: str
    step: int | None
    start: int | None
    steps: int
    """Done in this attempt."""
    layer: int | None
    waiting: str
    since_s: float
    """How long it has been doing this, by its own clock."""
    patience_s: float
    """How long that may be."""
    usual_s: float
    """How long an action may last, waits of all workers for one another aside."""

    @property
    def at(self) -> str:
        """Where in the run it was."""
        layer = f" in layer {self.layer}" if self.layer is not None else ""
        return self.what + layer + (f" of step {self.step}" if self.step is not None else "")


_BEAT = TypeAdapter(Beat)


class Beating:
    """A context in which a worker gives signs of life, from a thread of its own."""

    def __init__(self, folder: Path, place: Place, attempt: int, doing: Doing, node: str = "") -> None:
        self._path, self._place, self._attempt = path_of(folder, place.replica, place.stage), place, attempt
        self._doing, self._node, self._host = doing, node, socket.gethostname()
        self._number = 0
        self._recurring = Recurring(self._beat, PERIOD, "beats")

    def __enter__(self) -> Beating:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._beat(bytes(_PRESENT.size))
        self._map()
        self._recurring.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recurring.end()
        self._doing.what = "failed" if error is not None else "gone"
        self._beat()

    def _map(self) -> None:
        """Has every turn written to the file as it begins."""
        try:
            with self._path.open("r+b") as file:
                present = mmap.mmap(file.fileno(), _SIZE + _PRESENT.size)
        except (OSError, ValueError):  # not every storage can be mapped; then the beats alone tell
            return
        doing = self._doing

        def tell() -> None:
            step, start = (-1 if one is None else one for one in (doing.step, doing.start))
            what = str(doing.what).encode()
            _PRESENT.pack_into(present, _SIZE, self._attempt, doing.turns, step, start, doing.steps, doing.usual, what)

        doing.tell = tell

    def _beat(self, behind: bytes = b"") -> None:
        self._number += 1
        doing, place = self._doing, self._place
        beat = Beat(
            place.replica, place.stage, self._attempt, os.getpid(), self._host, self._node, self._number,
            doing.turns, str(doing.what), doing.step, doing.start, doing.steps, doing.layer, doing.waiting,
            doing.since, doing.patience, doing.usual,
        )  # fmt: skip
        # in place and of one size: on a full disk nothing new can be written, and a worker is not to fall silent for it
        text = json.dumps(asdict(beat)).encode().ljust(_SIZE) + behind
        with suppress(OSError):  # the next one may succeed; a worker that cannot be heard is found silent
            try:
                self._write(text)
            except FileNotFoundError:  # somebody has removed the folder
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._write(text[:_SIZE] + bytes(_PRESENT.size))
                self._map()

    def _write(self, text: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, text, 0)
        finally:
            os.close(file)


def path_of(folder: Path, replica: int, stage: int) -> Path:
    """Returns the file of one worker."""
    return folder / f"{replica}-{stage}.json"


def read_beat(folder: Path, replica: int, stage: int, attempt: int) -> Beat | None:
    """Returns what a worker of an attempt said last; None where it said nothing, or is saying it now."""
    try:
        data = path_of(folder, replica, stage).read_bytes()
        beat = _BEAT.validate_json(data[:_SIZE])
    except (OSError, ValueError):
        return None
    if beat.attempt != attempt:
        return None
    return _brought_up(beat, data[_SIZE:])


def _brought_up(beat: Beat, present: bytes) -> Beat:
    """Returns a beat with the turn that began since, if one did."""
    if len(present) < _PRESENT.size:
        return beat
    attempt, turns, step, start, steps, usual, what = _PRESENT.unpack_from(present)
    if attempt != beat.attempt or turns <= beat.turns:
        return beat
    return replace(
        beat, turns=turns, step=_known(step), start=_known(start), steps=steps,
        what=what.rstrip(b"\0").decode(errors="replace"), usual_s=usual, patience_s=max(usual, beat.patience_s),
        layer=None, waiting="", since_s=0.0,
    )  # fmt: skip


def _known(number: int) -> int | None:
    return None if number < 0 else number
