"""Where the traceback of an unexpected exception goes: a person at the terminal gets one sentence with its path."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from launch.runs import CACHE


def log_error(error: BaseException) -> Path | None:
    """Appends the traceback to ``errors.log`` in the cache, or in the folder for temporary files where that cannot be
    written; returns its path, None where neither can."""
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
