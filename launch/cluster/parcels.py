"""What changed in a folder, as values: a run's folder on one node follows the same folder on another.

node b   metrics.jsonl  |-- known --|-- new --|      -> Piece("metrics.jsonl", at=known, data=new)
         beats/0-1.json |-- changed ---------|       -> Piece("beats/0-1.json", at=0, all of it)
         messages.log   |-- known --|-- new --|      -> Piece("messages.log", at=END, data=new): all nodes write it
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from suite.paths import extract_files, safe_join

END = -1
"""Behind what the file has."""

SPOKEN = frozenset({"messages.log"})
"""Files that every node adds to."""

GROWING = frozenset({".jsonl", ".log", ".wandb"})
"""Files that are added to, and now and then cut and written on."""

MARKER = ".shared"
"""File by which another node tells whether a folder is the same one there."""

LEFT_OUT = ("checkpoints", "ray-train", "lock", MARKER)
"""What is not carried: too large, or of one node alone."""

LOCK = ".lock"
"""How names of files end that are locks of one node; they are not carried."""

MOST = 8 * 2**20
"""Bytes of one file that are carried at a time; the rest comes with the next."""

_LOOK = 64
"""Bytes before the known end of a file: where they differ, it was written anew."""


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    path: str
    at: int
    data: bytes
    whole: bool
    """Whether the file ends with it."""


@dataclass(frozen=True)
class _Mark:
    size: int
    changed_ns: int
    last: bytes


class Changes:
    """What changes in a folder from now on; ``from_now`` false: all that it has is new."""

    def __init__(self, folder: Path, from_now: bool = True) -> None:
        self._folder = folder
        self._marks: dict[str, _Mark] = {}
        if from_now:
            for _ in self.take():
                pass

    def take(self) -> Iterator[Piece]:
        """Yields what is new since the last time."""
        for path in sorted(files_of(self._folder)):
            name = str(path.relative_to(self._folder))
            try:
                piece = self._piece(path, name)
            except OSError:  # it went, or is being replaced: the next look sees
                continue
            if piece is not None:
                yield piece

    def _piece(self, path: Path, name: str) -> Piece | None:
        status, mark = path.stat(), self._marks.get(name)
        if mark is not None and (status.st_size, status.st_mtime_ns) == (mark.size, mark.changed_ns):
            if name.startswith("beats/"):  # what is written through memory does not always change the time
                return self._all(path, name, status.st_mtime_ns)
            return None
        with path.open("rb") as file:
            if mark is not None and status.st_size >= mark.size and path.suffix in GROWING:
                file.seek(max(0, mark.size - _LOOK))
                before = file.read(min(_LOOK, mark.size))
                if before == mark.last:
                    data = file.read(MOST)
                    last = (before + data)[-_LOOK:]
                    self._marks[name] = _Mark(mark.size + len(data), status.st_mtime_ns, last)
                    return Piece(name, END if name in SPOKEN else mark.size, data, False) if data else None
        return self._all(path, name, status.st_mtime_ns)

    def _all(self, path: Path, name: str, changed_ns: int) -> Piece:
        data = path.read_bytes()
        self._marks[name] = _Mark(len(data), changed_ns, data[-_LOOK:])
        return Piece(name, 0, data, True)


def put(folder: Path, piece: Piece) -> None:
    """Writes a piece to the folder that follows. Raises PathError where its path leaves the folder."""
    path = safe_join(folder, piece.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(0, 2) if piece.at == END else file.seek(piece.at)
        file.write(piece.data)
        if piece.whole:
            file.truncate()


def files_of(folder: Path) -> Iterator[Path]:
    """Yields the files of a run's folder that are carried."""
    for path in folder.glob("*"):
        if path.name in LEFT_OUT:
            continue
        below = [path] if path.is_file() else path.rglob("*")
        yield from (one for one in below if one.is_file() and one.suffix != LOCK)


def packed(folder: Path) -> bytes:
    """Returns a folder's files that are carried, as a tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        for path in sorted(files_of(folder)):
            tar.add(path, str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Lays packed files out in a folder, over those that are there. Raises PathError, before anything is written, for
    what is no regular file below the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        extract_files(tar, folder)
