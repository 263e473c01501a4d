"""Inside a job: copies its runs to a URL while they run, because the head's disk may not outlive the job, and back to
resume one.

head's folder   runs/<name>/<id>/      -- every minute, if changed --> <url>/runs/<name>/<id>/
                    system/ logs/ ...  -- every ten minutes: they have a file per worker
workers         checkpoints            -- as they are written -------> <url>/checkpoints/<name>/<id>/
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from launch.error_log import log_error
from launch.jobs.remote_archive import list_files
from launch.runs.store import COPIES, RUNS, job_notes
from launch.worker.attempt import TEMPORARY
from suite.errors import SuiteError
from suite.paths import hide_secrets, safe_join
from suite.training.checkpoint.object_store import open_store
from suite.training.periodic import PeriodicThread

INTERVAL_S, FOLDERS_S = 60.0, 600.0
"""Seconds between two copies of the files in a run's folder, and of those in folders below it."""

REMOVED = ("record.json", *TEMPORARY)
"""Files of a run that it may remove; their copies must go too, because a restored run would be another one."""

AT_ONCE = 16
"""Files that are copied at the same time."""

MAX_REFUSALS_IN_A_ROW = 3
"""A copy ends after the store refuses so many files in a row: then the store is at fault, and each may take long."""


class CopyError(SuiteError):
    """Some files of a run could not be copied."""


class RunCopies:
    """Copies changed files of the folders that a job recorded."""

    def __init__(self, runs: Path, notes: Path, url: str) -> None:
        self._runs, self._notes, self._url = runs.resolve(), notes, f"{url.rstrip('/')}/runs"
        self._copied: dict[str, tuple[int, int] | None] = {}
        """The size and time of each file that has a copy; None for one of REMOVED whose copy is gone, too."""
        self._folders_due_s = 0.0
        """When files in folders are copied again; monotonic clock."""
        self._refused: dict[str, None] = {}
        """Files that the store refused at the last attempt, oldest refusal first."""

    def copy(self, last: bool = True) -> int:
        """Copies files that are new or changed since the last copy; returns their number. Unless it is the ``last``
        copy, those in folders wait until FOLDERS_S after their previous one.

        Raises CopyError, after copying all others, for files that cannot be read or that the store refuses. After
        MAX_REFUSALS_IN_A_ROW the rest waits for the next copy. Refused files go last the next time.
        """
        files, root = open_store(self._url)
        states, unread = self._changed(last)
        waiting = [path for path in states if path not in self._refused]
        waiting += [path for path in self._refused if path in states]
        count, in_a_row = 0, 0
        refused: list[str] = []

        def put(path: str) -> str:
            """Copies a file; returns why the store refused it, or an empty text."""
            to = f"{root}/{Path(path).relative_to(self._runs)}"
            try:
                files.makedirs(to.rpartition("/")[0], exist_ok=True)
                files.put_file(path, to)
            except Exception as error:  # each store's library has its own errors
                return f"{path}: {error}"
            return ""

        with ThreadPoolExecutor(AT_ONCE) as pool:
            while waiting and in_a_row < MAX_REFUSALS_IN_A_ROW:
                batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
                for path, refusal in zip(batch, pool.map(put, batch), strict=True):
                    self._refused.pop(path, None)
                    if refusal:
                        self._refused[path] = None
                        self._copied.pop(path, None)  # whether the store has it is not known
                        refused.append(refusal)
                        in_a_row += 1
                    else:
                        self._copied[path] = states[path]
                        count, in_a_row = count + 1, 0
        refused += self._remove_gone(files, root)
        failures = [f"{len(unread)} of its files cannot be read: {unread[0]}"] if unread else []
        if refused:
            failures.append(f"the store refused {len(refused)} of its files: {refused[0]}")
        if failures:
            rest = "the rest waits for the next copy" if waiting else "all others are copied"
            raise CopyError(f"{'; '.join(failures)}; {rest}")
        return count

    def _remove_gone(self, files: Any, root: str) -> list[str]:
        """Removes the copies of REMOVED files that a run no longer has; returns why the store refused that."""
        refused = []
        for path in (f"{run}/{name}" for run in self._run_folders() for name in REMOVED):
            if os.path.exists(path) or self._copied.get(path, ()) is None:
                continue
            try:
                with suppress(FileNotFoundError):
                    files.rm_file(f"{root}/{Path(path).relative_to(self._runs)}")
                self._copied[path] = None
            except Exception as error:  # each store's library has its own errors
                refused.append(f"{path}: {error}")
        return refused

    def _run_folders(self) -> list[str]:
        return list(dict.fromkeys(self._notes.read_text().splitlines())) if self._notes.exists() else []

    def _changed(self, last: bool) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """Returns the size and time of each file to copy now, and why others cannot be read."""
        runs = self._run_folders()
        with_folders = last or time.monotonic() >= self._folders_due_s
        if with_folders:
            self._folders_due_s = time.monotonic() + FOLDERS_S
        states: dict[str, tuple[int, int]] = {}
        unread: list[str] = []
        for path in (path for run in runs for path in list_files(run) if with_folders or os.path.dirname(path) == run):
            try:
                state = os.stat(path)
                state_now = (state.st_size, state.st_mtime_ns)
                if self._copied.get(path) != state_now:
                    _check_readable(path)
                    states[path] = state_now
            except FileNotFoundError:  # deleted meanwhile
                continue
            except OSError as error:
                unread.append(str(error))
        return states, unread


def _check_readable(path: str) -> None:
    """Raises OSError if a file cannot be read to its end."""
    with open(path, "rb") as file:
        while file.read(2**20):
            pass


def restore(name: str, log: Callable[[str], None]) -> None:
    """Copies the run ``name/id`` from this job's URL to this head, which does not have it: its job ran on another one.
    Does nothing without a URL, or without such a run there. Raises CopyError."""
    url, run = os.environ.get(COPIES, ""), RUNS / name
    if not url or run.exists():
        return
    there, draft = f"{url.rstrip('/')}/runs/{name}", run.with_name(f"{run.name}.draft-{uuid4().hex}")
    try:
        files, root = open_store(there)
        paths = files.find(root)
        for path in paths:
            to = safe_join(draft, path.removeprefix(root).lstrip("/"))
            to.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(path, str(to))
        if paths:
            draft.rename(run)
            log(f"copied run {name} from {hide_secrets(there)}")
    except Exception as error:  # each store's library has its own errors
        raise CopyError(
            f"run {name} is not on this head, and could not be copied from {hide_secrets(there)}: "
            f"{hide_secrets(str(error))}"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def uploading(log: Callable[[str], None]) -> Iterator[None]:
    """A context that copies this job's runs if the job has a URL. A failed copy is logged and retried; the run
    continues."""
    url = os.environ.get(COPIES, "")
    if not url:
        yield
        return
    copies = RunCopies(RUNS, job_notes(), url)
    failed, shown = False, hide_secrets(url)

    def copy(last: bool, else_: str) -> None:
        nonlocal failed
        try:
            copies.copy(last)
            failed = False
        except Exception as error:
            if last or not failed:
                log(f"could not copy all of the run to {shown} ({hide_secrets(str(error))}); {else_}")
            failed = True

    retry = f"retrying every {INTERVAL_S:.0f} s"
    thread = PeriodicThread(lambda: copy(False, retry), INTERVAL_S, "copies", log_error)
    thread.start()
    try:
        yield
    finally:
        thread.end(INTERVAL_S)
        copy(True, f"its files are in {RUNS} on the head")
        if not failed:
            log(f"copied to {shown}/runs; checkpoints are in {shown}/checkpoints")
