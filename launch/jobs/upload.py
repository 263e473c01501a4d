"""Copies a job's runs to a URL while they run, because the head's disk may not outlive the job.

head's folder   runs/<name>/<id>/ --- every minute and at the end, changed files ----> <url>/runs/<name>/<id>/
workers         checkpoints ------- as they are written (train.checkpoint_dir) -------> <url>/checkpoints/<name>/<id>/
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.error_log import log_error
from launch.jobs.remote_archive import list_files
from launch.runs.store import COPIES, JOB, RUNS, STORAGE, job_notes
from suite.errors import SuiteError
from suite.paths import hide_secrets
from suite.training.checkpoint.object_store import open_store
from suite.training.periodic import PeriodicThread

INTERVAL_S = 60.0

MAX_REFUSALS_IN_A_ROW = 3
"""A copy ends after the store refuses so many files in a row: then the store is at fault, and each may take long."""


class CopyError(SuiteError):
    """Some files of a run could not be copied."""


class UploadThread:
    """Copies changed files of the folders that a job recorded."""

    def __init__(self, runs: Path, notes: Path, url: str) -> None:
        self._runs, self._notes, self._url = runs.resolve(), notes, f"{url.rstrip('/')}/runs"
        self._copied: dict[str, tuple[int, int]] = {}
        self._refused: dict[str, None] = {}
        """Files that the store refused at the last attempt, oldest refusal first."""

    def copy(self) -> int:
        """Copies files that are new or changed since the last copy; returns their number.

        Raises CopyError, after copying all others, for files that cannot be read or that the store refuses. After
        MAX_REFUSALS_IN_A_ROW the rest waits for the next copy. Refused files go last the next time.
        """
        files, root = open_store(self._url)
        order = {path: at for at, path in enumerate(self._refused, 1)}
        count, in_a_row = 0, 0
        unread: list[str] = []
        refused: list[str] = []
        for path in sorted(self._files(), key=lambda path: order.get(path, 0)):
            try:
                state = os.stat(path)
                state_now = (state.st_size, state.st_mtime_ns)
                if self._copied.get(path) == state_now:
                    continue
                _check_readable(path)
                to = f"{root}/{Path(path).relative_to(self._runs)}"
            except FileNotFoundError:  # deleted meanwhile
                continue
            except (OSError, ValueError) as error:
                unread.append(str(error))
                continue
            self._refused.pop(path, None)
            try:
                files.makedirs(to.rpartition("/")[0], exist_ok=True)
                files.put_file(path, to)
            except Exception as error:  # each store's library has its own errors
                self._refused[path] = None
                refused.append(f"{path}: {error}")
                in_a_row += 1
                if in_a_row == MAX_REFUSALS_IN_A_ROW:
                    break
                continue
            in_a_row = 0
            self._copied[path] = state_now
            count += 1
        failures = [f"{len(unread)} of its files cannot be read: {unread[0]}"] if unread else []
        if refused:
            failures.append(f"the store refused {len(refused)} of its files: {refused[0]}")
        if failures:
            rest = "the rest waits for the next copy" if in_a_row == MAX_REFUSALS_IN_A_ROW else "all others are copied"
            raise CopyError(f"{'; '.join(failures)}; {rest}")
        return count

    def _files(self) -> list[str]:
        folders = dict.fromkeys(self._notes.read_text().splitlines()) if self._notes.exists() else {}
        return [path for folder in folders for path in list_files(folder)]


def _check_readable(path: str) -> None:
    """Raises OSError if a file cannot be read to its end."""
    with open(path, "rb") as file:
        while file.read(2**20):
            pass


@contextmanager
def uploading(log: Callable[[str], None]) -> Iterator[None]:
    """A context that copies this job's runs if the job has a URL. A failed copy is logged and retried; the run
    continues."""
    url = os.environ.get(COPIES, "")
    if not url:
        yield
        return
    copies = UploadThread(RUNS, job_notes(Path(STORAGE), os.environ[JOB]), url)
    failed, shown = False, hide_secrets(url)

    def copy_and_log() -> None:
        nonlocal failed
        try:
            copies.copy()
            failed = False
        except Exception as error:
            if not failed:
                reason = hide_secrets(str(error))
                log(f"could not copy all of the run to {shown} ({reason}); retrying every {INTERVAL_S:.0f} s")
            failed = True

    thread = PeriodicThread(copy_and_log, INTERVAL_S, "copies", log_error)
    thread.start()
    try:
        yield
    finally:
        thread.end(INTERVAL_S)
        try:
            copies.copy()
            log(f"copied to {shown}/runs; checkpoints are in {shown}/checkpoints")
        except Exception as error:
            reason = hide_secrets(str(error))
            log(f"could not copy all of the run to {shown} ({reason}); its files are in {RUNS} on the head")
