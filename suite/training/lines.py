"""Files of lines that only grow: metrics, spikes, traces. A record that cannot be written does not end a training."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_TAIL = 4096


class Lines:
    """A file of JSON lines, each at once visible to whoever follows it.

    What a full disk does not take waits in memory, in order, and is tried again with the next line.
    """

    def __init__(self, path: Path, kept: int = 0) -> None:
        """The file's first ``kept`` bytes stay; what follows them is dropped."""
        self._path, self._waiting, self._told = path, b"", False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.ftruncate(self._file, kept)

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line."""
        self._waiting += json.dumps(line).encode() + b"\n"
        self._try()

    def close(self) -> None:
        """Closes the file, having tried for the last time."""
        self._try()
        os.close(self._file)

    def _try(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as error:
            if not self._told:
                with suppress(OSError):  # the log may lie on the same disk
                    print(f"{self._path.name} waits to be written: {error}", file=sys.stderr, flush=True)
            self._told = True


def reopened(path: Path, start: int) -> Lines:
    """Opens a file of lines to go on from a step; those of later steps are of a future that was given up.

    They are cut off where they are, which takes no room on a full disk.
    """
    kept = 0
    for raw in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            if json.loads(raw)["step"] > start or not raw.endswith(b"\n"):
                break
        except ValueError:  # torn by a crash
            break
        kept += len(raw)
    return Lines(path, kept)


def last_line(path: Path) -> dict[str, Any] | None:
    """Returns the last whole line of a file, of its last few thousand bytes alone; None where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            whole = file.read().rpartition(b"\n")[0]
        found = json.loads(whole.rpartition(b"\n")[2])
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file; one cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
