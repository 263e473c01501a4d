"""Folders that are prepared once: built next to their final path, renamed when complete, and rebuilt when damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import filelock

from suite.data.manifest import damage, write_manifest
from suite.errors import DataError
from suite.log import Log

_LOCK_SECONDS = 900.0


def cached(folder: Path, build: Callable[[Path], None], log: Log) -> None:
    """Calls ``build`` to fill a folder unless a valid one exists; one process at a time.

    Raises DataError when another process holds the lock too long, and whatever ``build`` raises; then nothing is left.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_suffix(".lock"))
    try:
        with lock.acquire(timeout=_LOCK_SECONDS):
            if not _is_valid(folder, log):
                _build(folder, build)
    except filelock.Timeout:
        raise DataError(
            f"another process has been preparing {folder} for more than {_LOCK_SECONDS:.0f} s; "
            "end it or wait for it, and run again"
        ) from None


def _is_valid(folder: Path, log: Log) -> bool:
    if not folder.exists():
        return False
    fault = damage(folder)
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
        write_manifest(building)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def save_rows(rows: datasets.Dataset, folder: Path) -> None:
    """Writes a table without a progress bar."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows.save_to_disk(str(folder))
    finally:
        if not shown:
            datasets.enable_progress_bars()
