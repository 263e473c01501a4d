"""Is a folder or a store the same from everywhere? What one node writes, every other must read."""

from __future__ import annotations

import time
from pathlib import Path

from suite.errors import CheckpointError
from suite.training.checkpoint.storage import Storage

SETTLE_S = 4.0
"""Seconds until a file that another node wrote must be seen: NFS keeps what it knows of a folder for 3 s at least."""


def is_local(location: str) -> bool:
    """Whether a place for runs is a folder, not a store's URL."""
    return "://" not in location or location.startswith(("file://", "local://"))


def write(location: str, mark: str, name: str, text: str) -> str:
    """Writes a small file into the folder ``mark`` of a place; returns why it could not, or nothing."""
    path = location.split("://")[-1]
    if is_local(location) and not Path(path).is_dir():
        return "there is no such folder"  # and none is made: a share that is not mounted would be hidden by it
    try:
        Storage(location).write(f"{mark}/{name}", text.encode())
    except (OSError, CheckpointError) as error:  # the latter where a store's driver is not installed
        return _reason(error)
    return ""


def unread(location: str, mark: str, expected: dict[str, str]) -> dict[str, str]:
    """Returns the files of ``mark`` that cannot be read as they were written, each with the reason."""
    storage = Storage(location)
    until = time.monotonic() + SETTLE_S
    while True:
        missing = {name: why for name, text in expected.items() if (why := _unread(storage, f"{mark}/{name}", text))}
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(0.5)


def _unread(storage: Storage, path: str, text: str) -> str:
    try:
        found = storage.read(path, len(text) + 1)
    except FileNotFoundError:
        return "it is not there"
    except OSError as error:
        return _reason(error)
    return "" if found == text.encode() else f"{len(found)} bytes are there, other than the {len(text)} written"


def remove(location: str, mark: str) -> None:
    """Removes the folder of markers, as far as it can be."""
    try:
        Storage(location).remove_folder(mark)
    except (OSError, CheckpointError):
        return


def _reason(error: Exception) -> str:
    cause = error.__cause__
    return (cause.strerror if isinstance(cause, OSError) and cause.strerror else "") or str(error)
