"""Checks that a folder or an object store is shared: what one node writes, every other node must be able to read."""

from __future__ import annotations

import time
from pathlib import Path

from suite.errors import CheckpointError
from suite.training.checkpoint.storage import Storage

SETTLE_S = 4.0
"""Seconds until a file written on another node must be visible: NFS caches directory entries for at least 3 s."""


def is_local(location: str) -> bool:
    """Whether a location is a folder, not the URL of an object store."""
    return "://" not in location or location.startswith(("file://", "local://"))


def write(location: str, mark: str, name: str, text: str) -> str:
    """Writes a small file into the folder ``mark`` of a location; returns an error message, or an empty string."""
    path = location.split("://")[-1]
    if is_local(location) and not Path(path).is_dir():
        return "there is no such folder"  # not created, because that would hide that a share is not mounted
    try:
        Storage(location).write(f"{mark}/{name}", text.encode())
    except (OSError, CheckpointError) as error:  # CheckpointError: the store's driver is not installed
        return _reason(error)
    return ""


def unread(location: str, mark: str, expected: dict[str, str]) -> dict[str, str]:
    """Returns the files of ``mark`` that cannot be read back with the expected text, with the reasons."""
    storage = Storage(location)
    until = time.monotonic() + SETTLE_S
    while True:
        missing = {
            name: reason for name, text in expected.items() if (reason := _unread(storage, f"{mark}/{name}", text))
        }
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(0.5)


def _unread(storage: Storage, path: str, text: str) -> str:
    try:
        data = storage.read(path, len(text) + 1)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return _reason(error)
    return "" if data == text.encode() else f"it has {len(data)} bytes, different from the {len(text)} written"


def remove(location: str, mark: str) -> None:
    """Removes the folder of markers, if possible."""
    try:
        Storage(location).remove_folder(mark)
    except (OSError, CheckpointError):
        return


def _reason(error: Exception) -> str:
    cause = error.__cause__
    return (cause.strerror if isinstance(cause, OSError) and cause.strerror else "") or str(error)
