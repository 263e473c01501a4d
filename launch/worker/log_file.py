"""A worker's log: its standard output and error, in a file that is rotated."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from suite.training.periodic import PeriodicThread

MAX_BYTES, ROTATE_S = 2**24, 60.0
"""Size of a log above which it is rotated, and the seconds between two looks: a user's layers may print."""


def log_to(log_file: Path) -> None:
    """Sends this process's standard output and error to its own log file, and rotates it until the process ends."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    PeriodicThread(partial(rotate, log_file), ROTATE_S, "log").start()


def rotate(log_file: Path) -> None:
    """Moves the content of a large log to ``<name>.1``, in place of that file's. The processes that append to the log
    go on. Raises OSError."""
    if log_file.stat().st_size <= MAX_BYTES:
        return
    older = Path(f"{log_file}.1")
    try:
        shutil.copyfile(log_file, older)
    except OSError:  # a full disk, which the older lines would keep full
        older.unlink(missing_ok=True)
    os.truncate(log_file, 0)
