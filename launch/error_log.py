"""The sentence that the terminal shows for an exception, and the log file for tracebacks of unexpected ones."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

from launch.runs.store import CACHE, RUNS
from suite.errors import SuiteError, first_line
from suite.paths import hide_secrets


def log_error(error: BaseException) -> Path | None:
    """Appends the traceback to ``errors.log`` in the cache, or, if that is not writable, to a new file in the temporary
    folder; returns its path, or None if neither is."""
    trace = "".join(traceback.format_exception(error))
    entry = hide_secrets(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)[:1000]}\n{trace}\n")
    for place in (_cache_log, _temporary_log):
        with suppress(OSError):
            path = place()
            with path.open("a", errors="backslashreplace") as file:
                file.write(entry)
            return path
    return None


def _cache_log() -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE.resolve() / "errors.log"


@cache
def _temporary_log() -> Path:
    """Returns a file of this process's own: another user could have made one of a known name, or a link."""
    file, path = tempfile.mkstemp(prefix="gpipe-errors-", suffix=".log")
    os.close(file)
    return Path(path)


def describe_error(error: BaseException) -> tuple[str, int]:
    """Returns the error message of an exception, and the exit code."""
    if isinstance(error, SuiteError):
        return hide_secrets(str(error)), 2
    if isinstance(error, OSError):
        file = error.filename or "a file"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{file} cannot be written: {error.strerror}; free space and try again", 2
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) or file in (str(CACHE), str(RUNS)):  # in /proc
            return f"{file} cannot be read or written: {error.strerror}; check its permissions or work elsewhere", 2
        if error.errno == errno.ENAMETOOLONG:
            return f"{str(file)[:60]}... is too long for a file name; give a shorter one", 2
    log = log_error(error)
    where = f"the traceback is in {log}" if log else "the traceback could not be written to a log"
    return f"{type(error).__name__}: {hide_secrets(first_line(error))[:300]}; this is a defect of the suite, {where}", 1
