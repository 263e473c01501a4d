"""One asynchronous save: a thread writes a checkpoint while training continues.

Each worker with layers to write writes a start marker, its layers, and then its file list: names, sizes and digests of
the layers. Rank 0 waits for all file lists, publishes the manifest and removes the markers. A folder with a marker and
no manifest is an interrupted save; a folder with neither has lost its manifest. The names of layers and file lists have
an id that all workers agreed on when the save began, so files of another save are never mistaken for it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import save
from torch import Tensor

from suite.log import Log
from suite.training.checkpoint.manifest import LAYER, File, Manifest, digest, layer_file
from suite.training.checkpoint.ownership import check_owner
from suite.training.checkpoint.retention import ABANDONED, KEEP_BEST, KEEP_GOOD, mark, rotate
from suite.training.checkpoint.storage import BEGUN, MANIFEST, Storage

FIRST_POLL_S, LONGEST_POLL_S = 0.01, 1.0
"""Seconds between polls for the other workers' file lists. It grows, because an object store charges for each poll."""

Snapshot = dict[int, dict[str, Tensor]]
Files = dict[str, File]
_FILES: TypeAdapter[Files] = TypeAdapter(Files)


def folder_of(step: int) -> str:
    return f"{step:08d}"


@dataclass(frozen=True)
class ManifestJob:
    """What rank 0 needs to publish the manifest."""

    notes: dict[str, Any]
    good_step: int | None
    """Step of the previous checkpoint, if a finite step followed it."""
    best: bool
    """Whether no validation before was better."""
    log: Log
    owner: str
    """Who must own the checkpoints (``ownership``)."""
    on_published: Callable[[int], None]
    """Called with the step before older checkpoints are removed."""
    stale: set[str]
    """Folders of steps after the one that the run resumed from."""
    writers: list[int]
    """The ranks that write, 0 among them."""


class AsyncSave:
    """One worker's running save. Its daemon thread ends with the process."""

    def __init__(
        self, storage: Storage, step: int, save_id: str, snapshot: Snapshot, rank: int, job: ManifestJob | None
    ) -> None:
        self.step = step
        self._storage, self._folder, self._save_id, self._snapshot = storage, folder_of(step), save_id, snapshot
        self._rank, self._manifest_job = rank, job
        self._written, self._ended, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._fault: str | None = None
        self._layers_written = 0
        self.published = False
        threading.Thread(target=self._run, name=f"save of step {step}", daemon=True).start()

    def wait_written(self, seconds: float) -> tuple[str | None, bool]:
        """Waits for this worker's files; returns the error message, if any, and whether it is not done but has written
        a layer meanwhile."""
        before = self._layers_written
        if self._written.wait(seconds):
            return self._fault, False
        return f"no layer written within {seconds:.0f} s", self._layers_written > before

    def wait_ended(self, seconds: float) -> str | None:
        """Waits for the thread to end and returns the error message, if any."""
        return self._fault if self.ends_within(seconds) else f"not done within {seconds:.0f} s"

    def ends_within(self, seconds: float) -> bool:
        """Waits for the thread and returns whether it has ended, with or without an error."""
        return self._ended.wait(seconds)

    def give_up(self) -> None:
        """Tells the publishing thread that some file lists will not come; it then removes the folder."""
        self._given_up.set()

    def _run(self) -> None:
        files: Files = {}
        with self._noting_fault():
            self._write(files)
        self._written.set()
        if self._manifest_job is not None:
            with self._noting_fault():
                self._publish(files, self._manifest_job)
        self._ended.set()

    @contextmanager
    def _noting_fault(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fault = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # the log may be on the same full disk
                traceback.print_exc()

    def _write(self, files: Files) -> None:
        self._storage.write(self._start_marker(self._rank), b"")
        for layer in sorted(self._snapshot):
            data = save(self._snapshot.pop(layer))
            name = layer_file(layer, self._save_id)
            self._storage.write(f"{self._folder}/{name}", data)
            files[name] = File(bytes=len(data), sha256=digest(data))
            self._layers_written += 1
        if self._manifest_job is None:
            self._storage.write(self._file_list(self._rank), _FILES.dump_json(files))

    def _publish(self, files: Files, manifest_job: ManifestJob) -> None:
        others = [rank for rank in manifest_job.writers if rank != self._rank]
        if self._fault is not None or not self._wait_for([self._file_list(rank) for rank in others]):
            self._given_up.wait()  # others may still be writing; the next save point checks all of them
            check_owner(self._storage, manifest_job.owner)
            self._remove_failed()
            return
        for rank in others:
            path = self._file_list(rank)
            files |= _FILES.validate_json(self._storage.read(path, self._storage.size(path)))
        manifest = Manifest(step=self.step, written=time.time(), files=files, notes=manifest_job.notes)
        if manifest_job.best:  # before the manifest: a finished checkpoint has its mark
            mark(self._storage, self._folder, KEEP_BEST)
        self._storage.settle(self._folder)  # in a power cut the manifest must not survive without its files
        check_owner(self._storage, manifest_job.owner)
        self._storage.write(f"{self._folder}/{MANIFEST}", manifest.encode())
        names = self._storage.names(self._folder)
        for old in {ABANDONED, KEEP_GOOD, KEEP_BEST} & names:
            if old != KEEP_BEST or not manifest_job.best:
                self._storage.remove(f"{self._folder}/{old}")  # of the abandoned checkpoint that this one replaces
        self._storage.settle(self._folder)
        self.published = True
        temporary = [*map(self._start_marker, manifest_job.writers), *map(self._file_list, others)]
        if ABANDONED in names:  # otherwise other layers may be a late driver's, whose manifest is yet to come
            temporary += [f"{self._folder}/{name}" for name in names - manifest.files.keys() if name.startswith(LAYER)]
        self._clean_up(temporary, manifest_job)

    def _remove_failed(self) -> None:
        """Removes what was written of this save, and not the abandoned checkpoint that it was to replace."""
        names = self._storage.names(self._folder)
        if MANIFEST not in names:
            self._storage.remove_folder(self._folder)
            return
        for name in names:
            if name.startswith(BEGUN) or self._save_id in name:
                self._storage.remove(f"{self._folder}/{name}")

    def _wait_for(self, paths: list[str]) -> bool:
        """Returns whether all files appeared before this save was given up."""
        pause, wanted = FIRST_POLL_S, {path.rpartition("/")[2] for path in paths}
        while not wanted <= (self._storage.names(self._folder) if wanted else set()):
            if self._given_up.wait(pause):
                return False
            pause = min(2 * pause, LONGEST_POLL_S)
        return True

    def _clean_up(self, temporary: list[str], manifest_job: ManifestJob) -> None:
        try:
            manifest_job.on_published(self.step)
            check_owner(self._storage, manifest_job.owner)
            for path in temporary:
                self._storage.remove(path)
            if manifest_job.good_step is not None:
                mark(self._storage, folder_of(manifest_job.good_step), KEEP_GOOD)
            rotate(self._storage, self.step, manifest_job.stale)
        except OSError as error:
            with suppress(OSError):
                manifest_job.log(f"old checkpoints could not be removed: {error}")

    def _start_marker(self, rank: int) -> str:
        return f"{self._folder}/{BEGUN}{rank}"

    def _file_list(self, rank: int) -> str:
        return f"{self._folder}/share-{rank}-{self._save_id}.json"
