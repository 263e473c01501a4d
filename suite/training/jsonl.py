"""Append-only JSON-lines files: metrics, traces. A write that fails does not end the training."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_BLOCK, _SEARCHED = 2**16, 2**24
"""Bytes read at once, and at most for one line: 16 MiB are the lines of some 30,000 steps."""


class JsonLinesFile:
    """A file of JSON lines. Readers see each line at once.

    Lines that a full disk rejects stay in memory, in order, and are retried with the next line.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Keeps the file's first ``keep_bytes`` bytes and drops the rest."""
        self._path, self._pending, self._warned = path, b"", False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.ftruncate(self._file, keep_bytes)

    def write(self, line: dict[str, Any]) -> None:
        self._pending += json.dumps(line).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        """Writes pending lines if possible, then closes the file."""
        self._flush()
        os.close(self._file)

    def _flush(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._file, self._pending) :]
        except OSError as error:
            if not self._warned:
                with suppress(OSError):  # the log may be on the same disk
                    message = f"cannot write {self._path.name}, lines stay in memory: {error}"
                    print(message, file=sys.stderr, flush=True)
            self._warned = True


def reopen(path: Path, start: int) -> JsonLinesFile:
    """Opens a file to continue after step ``start``. Drops lines of later steps, which the resumed run repeats, and
    what a crash left after them. Reads the file from its end, to the last line that it keeps.

    Truncates in place, which needs no space on a full disk.
    """
    for end, raw in _from_end(path):
        line = parsed(raw) if raw.endswith(b"\n") else None
        if line is not None and line.get("step", start + 1) <= start:
            return JsonLinesFile(path, end)
    return JsonLinesFile(path)


def _from_end(path: Path, most: int = sys.maxsize) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with their newlines, the last first, and the byte at which each ends. Reads about
    ``most`` bytes, in blocks."""
    if not path.exists():
        return
    with path.open("rb") as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        least = max(0, begin - most)
        while begin > least:
            size = min(begin, _BLOCK)
            begin -= size
            file.seek(begin)
            lines = (file.read(size) + rest).splitlines(keepends=True)
            end = begin + sum(map(len, lines))
            rest = lines.pop(0) if begin > 0 else b""
            for raw in reversed(lines):
                yield end, raw
                end -= len(raw)


def last_line(path: Path, key: str = "") -> dict[str, Any] | None:
    """Returns the last whole line of a file, or the last one with ``key``; None if the last ``_SEARCHED`` bytes have
    none."""
    wanted = json.dumps(key).encode() + b":" if key else b""
    with suppress(OSError):
        for _, raw in _from_end(path, _SEARCHED):
            if wanted in raw and raw.endswith(b"\n") and (line := parsed(raw)) is not None:
                return line
    return None


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file with their newlines, also damaged ones; none without the file."""
    if path.exists():
        with path.open("rb") as file:
            yield from file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file. Skips damaged ones, such as one truncated by a crash."""
    return [line for raw in raw_lines(path) if (line := parsed(raw)) is not None]


def remove_stale(folder: Path, replicas: int, stages: int) -> None:
    """Removes files of workers that a run no longer has after it resumed with fewer stages or replicas."""
    names = {f"{replica}-{stage}.jsonl" for replica in range(replicas) for stage in range(stages)}
    for path in folder.glob("*.jsonl"):
        if path.name not in names:
            path.unlink()


def parsed(raw: bytes | str) -> dict[str, Any] | None:
    """Returns the object of a line; None for a damaged one."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
