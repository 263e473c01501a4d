"""Checks that a folder or an object store is shared: what one node writes, every other node must be able to read."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from suite.errors import CheckpointError
from suite.training.checkpoint.storage import Storage

SETTLE_S = 4.0
"""Seconds until a file written on another node must be visible: NFS caches directory entries for at least 3 s."""


def is_local(location: str) -> bool:
    """Whether a location is a folder, not the URL of an object store."""
    return "://" not in location or location.startswith(("file://", "local://"))


def folder_of(location: str) -> Path:
    """Returns the path of a local location, given as a path or as file://."""
    return Path(location.split("://")[-1])


def write(location: str, path: str, text: str) -> None:
    """Writes a small file below a location. Raises OSError with the reason in a few words."""
    if is_local(location) and not folder_of(location).is_dir():
        raise OSError("there is no such folder")  # not created, because that would hide that a share is not mounted
    try:
        Storage(location).write(path, text.encode())
    except (OSError, CheckpointError) as error:  # CheckpointError: the store's driver is not installed
        raise OSError(_reason(error)) from None


def unread(location: str, expected: dict[str, str], timeout_s: float = SETTLE_S) -> dict[str, str]:
    """Returns the files below a location that cannot be read back with the expected text, with the reasons. Tries until
    ``timeout_s``, because a network file system may show a file late."""
    storage = Storage(location)
    until = time.monotonic() + timeout_s
    while True:
        missing = {path: reason for path, text in expected.items() if (reason := _unread(storage, path, text))}
        if not missing or time.monotonic() >= until:
            return missing
        time.sleep(0.2)


def _unread(storage: Storage, path: str, text: str) -> str:
    try:
        data = storage.read(path, len(text) + 1)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return _reason(error)
    return "" if data == text.encode() else f"it has {len(data)} bytes, different from the {len(text)} written"


def remove(location: str, folder: str) -> None:
    """Removes a folder of such files, if possible."""
    with suppress(OSError, CheckpointError):
        Storage(location).remove_folder(folder)


def _reason(error: Exception) -> str:
    cause = error.__cause__
    return (cause.strerror if isinstance(cause, OSError) and cause.strerror else "") or str(error)
