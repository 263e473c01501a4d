"""A job's runs copied to a URL while they run: what is in the folder of a machine that will be gone is kept there.

head's folder   runs/<name>/<id>/ --- every minute, and at the end, what changed --> <url>/runs/<name>/<id>/
workers         checkpoints ------- as they are written (train.checkpoints) -------> <url>/checkpoints/<name>/<id>/
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from launch.jobs.packing import files_of
from launch.runs import COPIES, JOB, RUNS, STORAGE, job_notes
from suite.training.recurring import Recurring

EVERY_S = 60.0


class Copies:
    """Copies what changed below the folders that a job noted."""

    def __init__(self, runs: Path, notes: Path, url: str) -> None:
        self._runs, self._notes, self._url = runs.resolve(), notes, f"{url.rstrip('/')}/runs"
        self._copied: dict[str, tuple[int, int]] = {}

    def copy(self) -> int:
        """Copies what is new or changed since the last copy, and returns how many files that were.

        Raises OSError, or what the store's own library raises, when it cannot.
        """
        files: Any
        files, root = fsspec.url_to_fs(self._url)
        count = 0
        for path in self._files():
            state = os.stat(path)
            now = (state.st_size, state.st_mtime_ns)
            if self._copied.get(path) != now:
                to = f"{root}/{Path(path).relative_to(self._runs)}"
                files.makedirs(to.rpartition("/")[0], exist_ok=True)
                files.put_file(path, to)
                self._copied[path] = now
                count += 1
        return count

    def _files(self) -> list[str]:
        folders = dict.fromkeys(self._notes.read_text().splitlines()) if self._notes.exists() else {}
        return [path for folder in folders for path in files_of(folder)]


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
                say(f"the run could not be copied to {url} ({error}); it is tried again every {EVERY_S:.0f} s")
            failed = True

    keeping = Recurring(keep, EVERY_S, "copies")
    keeping.start()
    try:
        yield
    finally:
        keeping.end(EVERY_S)
        try:
            copies.copy()
            say(f"copied to {url}/runs; checkpoints are in {url}/checkpoints")
        except Exception as error:
            say(f"the run could not be copied to {url} ({error}); it is in {RUNS} of the head")
