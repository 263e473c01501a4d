"""Folders that are prepared once: built next to their final path, renamed when complete, and rebuilt when damaged.

The manifest of a folder has every file's size and SHA-256. Written last, it marks the folder complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path

import datasets
import filelock

from suite.errors import DataError
from suite.log import Log

_LOCK_SECONDS = 900.0
_MANIFEST = "manifest.json"


def cached(folder: Path, build: Callable[[Path], None], log: Log) -> None:
    """Calls ``build`` to fill a folder unless a valid one exists; one process at a time.

    Raises DataError when another process holds the lock too long, and whatever ``build`` raises; then nothing is left.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = shared_lock(folder.with_suffix(".lock"))
    try:
        with lock.acquire(timeout=_LOCK_SECONDS):
            if not _is_valid(folder, log):
                _build(folder, build)
    except filelock.Timeout:
        raise DataError(
            f"another process has been preparing {folder} for more than {_LOCK_SECONDS:.0f} s; "
            "end it or wait for it, and run again"
        ) from None


def shared_lock(path: Path, timeout_s: float = -1) -> filelock.BaseFileLock:
    """Returns the lock ``path``, for all users who may write to its folder. ``timeout_s`` below zero waits for ever."""
    return filelock.FileLock(path, timeout_s, mode=path.parent.stat().st_mode & 0o666 | 0o600)


def _is_valid(folder: Path, log: Log) -> bool:
    if not folder.exists():
        return False
    fault = find_damage(folder)
    if fault is None:
        return True
    log(f"the prepared data in {folder} is damaged ({fault}); preparing it again")
    shutil.rmtree(folder)
    return False


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)  # we hold the lock, so this is left from a process that died
    building.mkdir()
    try:
        build(building)
        _write_manifest(building)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    files.pop(_MANIFEST, None)
    return files


def _write_manifest(folder: Path) -> None:
    files = {name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for name, path in _files(folder).items()}
    (folder / _MANIFEST).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))


def find_damage(folder: Path) -> str | None:
    """Describes what is wrong with the folder; None when every file is intact."""
    try:
        listed = json.loads((folder / _MANIFEST).read_text())["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except FileNotFoundError:
        return f"{_MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    files = _files(folder)
    for name, (size, digest) in expected.items():
        if name not in files:
            return f"{name} is missing"
        if files[name].stat().st_size != size:
            return f"{name} has {files[name].stat().st_size} bytes instead of {size}"
        if _digest(files[name]) != digest:
            return f"{name} does not have the SHA-256 it was written with"
    surplus = sorted(set(files) - set(expected))
    return f"{surplus[0]} is not in {_MANIFEST}" if surplus else None


def save_rows(rows: datasets.Dataset, folder: Path) -> None:
    """Writes a table without a progress bar."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows.save_to_disk(str(folder))
    finally:
        if not shown:
            datasets.enable_progress_bars()
