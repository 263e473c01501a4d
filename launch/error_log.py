"""The log file for tracebacks of unexpected exceptions. The terminal shows one sentence with its path."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from launch.runs.store import CACHE


def log_error(error: BaseException) -> Path | None:
    """Appends the traceback to ``errors.log`` in the cache, or in the temporary folder if the cache is not writable;
    returns its path, or None if neither is."""
    trace = "".join(traceback.format_exception(error))
    entry = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)[:1000]}\n{trace}\n"
    for folder in (CACHE, Path(tempfile.gettempdir())):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder.resolve() / "errors.log"
            with path.open("a", errors="backslashreplace") as file:
                file.write(entry)
            return path
    return None
