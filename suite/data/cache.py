"""Folders that are prepared once: built next to their final path, renamed when complete, and rebuilt when damaged.

The manifest of a folder has every file's size and SHA-256. Written last, it marks the folder complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import datasets
import filelock

from suite.errors import DataError
from suite.log import Log

_LOCK_SECONDS = 900.0
_MANIFEST = "manifest.json"


def slug(source: str) -> str:
    """Returns the name of a source as a part of a folder's name."""
    return re.sub(r"\W+", "-", source)


def cache_folder(cache: Path, name: str, content: Any) -> Path:
    """Returns a cache folder whose name ends with a digest of ``content``: all that its files depend on."""
    return cache / f"{name}-{sha256(json.dumps(content).encode()).hexdigest()[:12]}"


def cached(folder: Path, build: Callable[[Path], None], log: Log) -> None:
    """Calls ``build`` to fill a folder unless a valid one exists; one process at a time.

    Raises DataError when another process holds the lock too long, and whatever ``build`` raises; then nothing is left.
    """
    with locked(folder):
        if folder.exists() and (fault := find_damage(folder)):
            log(f"the prepared data in {folder} is damaged ({fault}); preparing it again")
            shutil.rmtree(folder)
        if not folder.exists():
            _build(folder, build)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other process fills ``folder``: all users who may write beside it share its lock. Raises
    DataError when another process holds that too long."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_suffix(".lock"), mode=folder.parent.stat().st_mode & 0o666 | 0o600)
    try:
        acquired = lock.acquire(timeout=_LOCK_SECONDS)
    except filelock.Timeout:
        raise DataError(
            f"another process has been preparing {folder} for more than {_LOCK_SECONDS:.0f} s; "
            "end it or wait for it, and run again"
        ) from None
    with acquired:
        yield


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)  # we hold the lock, so this is left from a process that died
    building.mkdir()
    try:
        build(building)
        (building / _MANIFEST).write_text(json.dumps({"files": _entries(building)}, indent=1))
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def digest_of(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entry of each file below a folder."""
    # NFS keeps a removed file as .nfs... until no process has it open
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".nfs"))
    files = {path.relative_to(folder).as_posix(): path for path in found}
    files.pop(_MANIFEST, None)
    return {name: {"bytes": path.stat().st_size, "sha256": digest_of(path)} for name, path in sorted(files.items())}


def find_damage(folder: Path) -> str | None:
    """Describes what is wrong with the folder; None when every file is intact."""
    try:
        listed = json.loads((folder / _MANIFEST).read_text())["files"]
        sizes = {name: int(entry["bytes"]) for name, entry in listed.items()}
    except FileNotFoundError:
        return f"{_MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    files = _entries(folder)
    for name, size in sizes.items():
        if name not in files:
            return f"{name} is missing"
        if files[name]["bytes"] != size:
            return f"{name} has {files[name]['bytes']} bytes instead of {size}"
        if files[name] != listed[name]:
            return f"{name} does not have the SHA-256 it was written with"
    return next((f"{name} is not in {_MANIFEST}" for name in files if name not in listed), None)


def save_rows(rows: datasets.Dataset, folder: Path) -> None:
    """Writes a table without a progress bar."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows.save_to_disk(str(folder))
    finally:
        if not shown:
            datasets.enable_progress_bars()
