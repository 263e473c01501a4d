"""Folders that are prepared once: built beside their place, moved into it whole, named and built again when damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import filelock

from suite.data.manifest import damage, write_manifest
from suite.errors import DataError

Say = Callable[[str], None]

_LOCK_SECONDS = 900.0


def cached(folder: Path, build: Callable[[Path], None], say: Say) -> None:
    """Has ``build`` fill a folder unless it stands already; one process at a time.

    Raises DataError when another process holds the folder too long, and whatever ``build`` raises; then nothing stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_suffix(".lock"))
    try:
        with lock.acquire(timeout=_LOCK_SECONDS):
            if not _usable(folder, say):
                _build(folder, build)
    except filelock.Timeout:
        raise DataError(
            f"another process has been preparing {folder} for more than {_LOCK_SECONDS:.0f} s; "
            "end it, or wait until it is done, and run again"
        ) from None


def _usable(folder: Path, say: Say) -> bool:
    if not folder.exists():
        return False
    fault = damage(folder)
    if fault is None:
        return True
    say(f"the prepared data in {folder} is damaged ({fault}); it is not used but built again")
    shutil.rmtree(folder)
    return False


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)  # the lock is ours: what is there was left by a process that died
    building.mkdir()
    try:
        build(building)
        write_manifest(building)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def save_rows(rows: datasets.Dataset, folder: Path) -> None:
    """Writes a table without a progress bar of its own."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows.save_to_disk(str(folder))
    finally:
        if not shown:
            datasets.enable_progress_bars()
