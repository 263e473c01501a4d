"""A job's runs copied to a URL while they run: what is in the folder of a machine that will be gone is kept there.

head's folder   runs/<name>/<id>/ --- every minute, and at the end, what changed --> <url>/runs/<name>/<id>/
workers         checkpoints ------- as they are written (train.checkpoints) -------> <url>/checkpoints/<name>/<id>/
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.error_log import log_error
from launch.jobs.packing import files_of
from launch.runs import COPIES, JOB, RUNS, STORAGE, job_notes
from suite.errors import SuiteError
from suite.training.checkpoint.object_store import open_store
from suite.training.recurring import Recurring

EVERY_S = 60.0

REFUSALS = 3
"""Files in a row that the store refuses before a copy ends: then it is not the files, and each may take long."""


class CopyError(SuiteError):
    """Some files of a run are not where they are to be kept."""


class Copies:
    """Copies what changed below the folders that a job noted."""

    def __init__(self, runs: Path, notes: Path, url: str) -> None:
        self._runs, self._notes, self._url = runs.resolve(), notes, f"{url.rstrip('/')}/runs"
        self._copied: dict[str, tuple[int, int]] = {}
        self._refused: dict[str, None] = {}
        """Files that the store refused at their last copy, the earliest refused first."""

    def copy(self) -> int:
        """Copies what is new or changed since the last copy, and returns how many files that were.

        Raises CopyError, once all others are copied, for files that cannot be read and for those that the store
        refuses; after REFUSALS in a row the rest waits for the next copy. Refused files go last the next time.
        """
        files, root = open_store(self._url)
        order = {path: at for at, path in enumerate(self._refused, 1)}
        count, in_a_row = 0, 0
        unread: list[str] = []
        refused: list[str] = []
        for path in sorted(self._files(), key=lambda path: order.get(path, 0)):
            try:
                state = os.stat(path)
                now = (state.st_size, state.st_mtime_ns)
                if self._copied.get(path) == now:
                    continue
                _read_through(path)
                to = f"{root}/{Path(path).relative_to(self._runs)}"
            except FileNotFoundError:  # it went
                continue
            except (OSError, ValueError) as error:
                unread.append(str(error))
                continue
            self._refused.pop(path, None)
            try:
                files.makedirs(to.rpartition("/")[0], exist_ok=True)
                files.put_file(path, to)
            except Exception as error:  # each store's library has its own
                self._refused[path] = None
                refused.append(f"{path}: {error}")
                in_a_row += 1
                if in_a_row == REFUSALS:
                    break
                continue
            in_a_row = 0
            self._copied[path] = now
            count += 1
        failures = [f"{len(unread)} of its files cannot be read: {unread[0]}"] if unread else []
        if refused:
            failures.append(f"the store refused {len(refused)} of its files: {refused[0]}")
        if failures:
            rest = "the rest waits for the next copy" if in_a_row == REFUSALS else "all others are copied"
            raise CopyError(f"{'; '.join(failures)}; {rest}")
        return count

    def _files(self) -> list[str]:
        folders = dict.fromkeys(self._notes.read_text().splitlines()) if self._notes.exists() else {}
        return [path for folder in folders for path in files_of(folder)]


def _read_through(path: str) -> None:
    """Raises OSError where a file cannot be read to its end."""
    with open(path, "rb") as file:
        while file.read(2**20):
            pass


@contextmanager
def copied(say: Callable[[str], None]) -> Iterator[None]:
    """A context in which this job's runs are copied, if it is to copy them. A copy that fails is told and tried again;
    the run goes on."""
    url = os.environ.get(COPIES, "")
    if not url:
        yield
        return
    copies = Copies(RUNS, job_notes(Path(STORAGE), os.environ[JOB]), url)
    failed = False

    def keep() -> None:
        nonlocal failed
        try:
            copies.copy()
            failed = False
        except Exception as error:
            if not failed:
                say(f"not all of the run was copied to {url} ({error}); it is tried again every {EVERY_S:.0f} s")
            failed = True

    keeping = Recurring(keep, EVERY_S, "copies", log_error)
    keeping.start()
    try:
        yield
    finally:
        keeping.end(EVERY_S)
        try:
            copies.copy()
            say(f"copied to {url}/runs; checkpoints are in {url}/checkpoints")
        except Exception as error:
            say(f"not all of the run was copied to {url} ({error}); it is in {RUNS} of the head")
