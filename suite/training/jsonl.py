"""Append-only JSON-lines files: metrics, loss spikes, traces. A write that fails does not end the training."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_TAIL = 32768
"""Bytes: more than a line has, such as that of a validation in a hundred languages."""

_BLOCK, _SEARCHED = 2**16, 2**24
"""Bytes read at once, and at most: 16 MiB are the lines of some 30,000 steps."""


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
        """Appends a line."""
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


def _from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with their newlines, the last first, and the byte at which each ends."""
    if not path.exists():
        return
    with path.open("rb") as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        while begin > 0:
            size = min(begin, _BLOCK)
            begin -= size
            file.seek(begin)
            lines = (file.read(size) + rest).splitlines(keepends=True)
            end = begin + sum(map(len, lines))
            rest = lines.pop(0) if begin > 0 else b""
            for raw in reversed(lines):
                yield end, raw
                end -= len(raw)


def last_line(path: Path) -> dict[str, Any] | None:
    """Returns the last complete line of a file; None without one. Reads only the file's last 32 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            complete = file.read().rpartition(b"\n")[0]
        line = json.loads(complete.rpartition(b"\n")[2])
    except (OSError, ValueError):
        return None
    return line if isinstance(line, dict) else None


def last_line_with(path: Path, key: str) -> dict[str, Any] | None:
    """Returns the last complete line that has ``key``; None without one. Reads the file from its end, 64 KiB at a time,
    and at most ``_SEARCHED`` bytes."""
    wanted, rest = json.dumps(key).encode() + b":", b""
    with suppress(OSError), path.open("rb") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end > max(0, size - _SEARCHED):
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            block = file.read(end - begin) + rest
            lines = block.split(b"\n") if wanted in block else [block.partition(b"\n")[0]]
            complete = lines[:-1] if end == size else lines
            for line in reversed(complete if begin == 0 else complete[1:]):
                if wanted in line:
                    with suppress(ValueError):
                        found: dict[str, Any] = json.loads(line)
                        return found
            end, rest = begin, lines[0]
    return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file. Skips damaged ones, such as one truncated by a crash."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [line for raw in file if (line := parsed(raw)) is not None]


def parsed(raw: bytes | str) -> dict[str, Any] | None:
    """Returns the object of a line; None for a damaged one."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
