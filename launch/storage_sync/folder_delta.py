"""Changes of a folder, with which a run's folder on one node is kept equal to that on another.

node b   metrics.jsonl        |-- known --|-- new --|  -> FileDelta("metrics.jsonl", at=known, data=new)
         gpu/0-1-1.json       |------ changed ------|  -> FileDelta("gpu/0-1-1.json", at=0, data=whole file)
         messages.log         |-- known --|-- new --|  -> FileDelta("messages.log", at=END, data=new): written by all
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch import node_probe
from launch.worker.attempt import draft_of
from suite.errors import PathError
from suite.paths import safe_join

END = -1
"""Offset of data to be appended to the file."""

APPENDED_BY_ALL = frozenset({"messages.log"})
"""Files that every node appends to."""

GROWING = frozenset({".jsonl", ".log", ".wandb"})
"""Suffixes of files that are appended to; they are sometimes truncated first."""

MARKER = ".shared"
"""Name of the file that shows another node whether the folder is shared."""

EXCLUDED = ("checkpoints", "ray-train", "heartbeats.json", "lock", MARKER)
"""Files and folders that are not copied: too large, or only the driver's."""

MAX_BYTES = 8 * 2**20
"""Most bytes of one file in a delta; the rest follows in the next one."""

_TAIL_BYTES = 64
"""Bytes before the known end of a file; if they differ, the file was rewritten."""


@dataclass(frozen=True)
class FileDelta:
    """A change of a file: ``data`` at offset ``at``; at 0 it is the whole file."""

    path: str
    at: int
    data: bytes


@dataclass(frozen=True)
class _FileState:
    size: int
    changed_ns: int
    tail: bytes


class FolderDelta:
    """Finds the changes of a folder: from now on, or with ``from_now`` false starting with all its files."""

    def __init__(self, folder: Path, from_now: bool = True, mark: str = "") -> None:
        """With a marker file whose content is ``mark`` the folder is the driver's own, and no change is found: the
        driver would receive its own appended lines again and again."""
        self._folder, self._mark = folder, mark
        self._is_shared = False
        self._states: dict[str, _FileState] = {}
        if from_now:
            self.take()

    def take(self) -> list[FileDelta]:
        """Returns the changes since the last call. What cannot be read now, such as a folder that is being removed, is
        found by a later call."""
        if self._mark and node_probe.has_marker(str(self._folder), MARKER, self._mark):
            self._is_shared = True
        if self._is_shared:
            return []
        deltas = []
        with suppress(OSError):
            for path in sorted(files_of(self._folder)):
                with suppress(OSError):
                    deltas.append(self._file_delta(path, str(path.relative_to(self._folder))))
        return [delta for delta in deltas if delta is not None]

    def _file_delta(self, path: Path, name: str) -> FileDelta | None:
        status, known = path.stat(), self._states.get(name)
        if known is not None and (status.st_size, status.st_mtime_ns) == (known.size, known.changed_ns):
            return None
        with path.open("rb") as file:
            if known is not None and status.st_size >= known.size and path.suffix in GROWING:
                file.seek(max(0, known.size - _TAIL_BYTES))
                tail = file.read(min(_TAIL_BYTES, known.size))
                if tail == known.tail:
                    data = file.read(MAX_BYTES)
                    new_tail = (tail + data)[-_TAIL_BYTES:]
                    self._states[name] = _FileState(known.size + len(data), status.st_mtime_ns, new_tail)
                    at = END if name in APPENDED_BY_ALL else known.size
                    return FileDelta(name, at, data) if data else None
        data = path.read_bytes()
        self._states[name] = _FileState(len(data), status.st_mtime_ns, data[-_TAIL_BYTES:])
        return FileDelta(name, 0, data)


def apply_delta(folder: Path, delta: FileDelta) -> None:
    """Applies a change to a folder. Raises PathError if its path is outside the folder."""
    path = safe_join(folder, delta.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if delta.at == END:
        with path.open("ab") as file:
            file.write(delta.data)
        return
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(delta.at)
        file.write(delta.data)
        if delta.at == 0:
            file.truncate()


def apply_from_node(run: Path, deltas: Sequence[FileDelta]) -> str:
    """Applies another node's changes to the run's folder; returns why one could not be written, or an empty text."""
    failure = ""
    for delta in deltas:
        try:
            apply_delta(run, delta)
        except (OSError, PathError) as error:
            failure = str(error)
        if delta.path in ("experiment.toml", "plan.json"):  # its worker has renamed the draft
            draft_of(run / delta.path).unlink(missing_ok=True)
    return failure


def files_of(folder: Path) -> Iterator[Path]:
    """Yields the files of a run's folder that are copied: none of EXCLUDED, and no lock files."""
    for path in folder.glob("*"):
        if path.name in EXCLUDED:
            continue
        files = [path] if path.is_file() else path.rglob("*")
        yield from (file for file in files if file.is_file() and file.suffix != ".lock")
