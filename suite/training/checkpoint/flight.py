"""One save on its way to the disk, in a thread of its own while training goes on.

Each stage of the first replica writes a mark that the save has begun, its layers, and then its share: names, sizes and
digests of what it wrote. The first rank waits for all shares, publishes the manifest and removes the marks: a folder
with a mark and no manifest is a save that was interrupted, one without either has lost its manifest. A share's name
holds a word that all workers were told when this save began, so what an earlier attempt left behind is never taken for
it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import save
from torch import Tensor

from suite.training.checkpoint.manifest import File, Manifest, digest, layer_file
from suite.training.checkpoint.retention import mark_good, rotate
from suite.training.checkpoint.storage import BEGUN, MANIFEST, Storage

FIRST_POLL_S, LONGEST_POLL_S = 0.01, 1.0
"""Seconds between looks for the others' shares: a store asks money for each."""

Snapshot = dict[int, dict[str, Tensor]]
Files = dict[str, File]
_FILES: TypeAdapter[Files] = TypeAdapter(Files)


def folder_of(step: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"{step:08d}"


@dataclass(frozen=True)
class Publication:
    """What the first rank adds to what the workers wrote."""

    stages: int
    notes: dict[str, Any]
    proven: int | None
    """The step of the checkpoint before, when a finite step has been done from it."""
    say: Callable[[str], None]


class Flight:
    """A worker's save under way. Its thread ends with the process, whatever it waits for."""

    def __init__(
        self, storage: Storage, step: int, word: str, snapshot: Snapshot, stage: int, publication: Publication | None
    ) -> None:
        self.step = step
        self._storage, self._folder, self._word, self._snapshot = storage, folder_of(step), word, snapshot
        self._stage, self._publication = stage, publication
        self._written, self._over, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._fault: str | None = None
        self.published = False
        threading.Thread(target=self._run, name=f"save of step {step}", daemon=True).start()

    def wait_written(self, seconds: float) -> str | None:
        """Waits for this worker's files; returns what went wrong."""
        return self._fault if self._written.wait(seconds) else f"not done within {seconds:.0f} s"

    def wait_over(self, seconds: float) -> str | None:
        """Waits for all that this worker does; returns what went wrong."""
        return self._fault if self.ends_within(seconds) else f"not done within {seconds:.0f} s"

    def ends_within(self, seconds: float) -> bool:
        """Waits for the thread; returns whether it is through, well or not."""
        return self._over.wait(seconds)

    def give_up(self) -> None:
        """Tells the first rank that not all shares will come: what was written is removed."""
        self._given_up.set()

    def _run(self) -> None:
        files: Files = {}
        self._note_fault(lambda: files.update(self._write()))
        self._written.set()
        more = self._publication
        if more is not None:
            self._note_fault(lambda: self._publish(files, more))
        self._over.set()

    def _note_fault(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._fault = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # the log may lie on the same full disk
                traceback.print_exc()

    def _write(self) -> Files:
        files: Files = {}
        self._storage.write(self._mark(self._stage), b"")
        for layer in sorted(self._snapshot):
            data = save(self._snapshot.pop(layer))
            name = layer_file(layer)
            self._storage.write(f"{self._folder}/{name}", data)
            files[name] = File(bytes=len(data), sha256=digest(data))
        if self._publication is None:
            self._storage.write(self._share(self._stage), _FILES.dump_json(files))
        return files

    def _publish(self, files: Files, more: Publication) -> None:
        others = range(1, more.stages)
        if self._fault is not None or not self._await([self._share(stage) for stage in others]):
            self._given_up.wait()  # until then others may be writing; all are asked at the next save point
            self._storage.remove_folder(self._folder)
            return
        for stage in others:
            share = self._share(stage)
            files |= _FILES.validate_json(self._storage.read(share, self._storage.size(share)))
        manifest = Manifest(step=self.step, written=time.time(), files=files, notes=more.notes)
        self._storage.settle(self._folder)  # no manifest may outlast a power cut that its files did not
        self._storage.write(f"{self._folder}/{MANIFEST}", manifest.encode())
        self._storage.settle(self._folder)
        self.published = True
        self._tidy([*map(self._mark, range(more.stages)), *map(self._share, others)], more)

    def _await(self, shares: list[str]) -> bool:
        """Returns whether all shares came before this save was given up."""
        pause, wanted = FIRST_POLL_S, {share.rpartition("/")[2] for share in shares}
        while not wanted <= (self._storage.names(self._folder) if wanted else set()):
            if self._given_up.wait(pause):
                return False
            pause = min(2 * pause, LONGEST_POLL_S)
        return True

    def _tidy(self, passing: list[str], more: Publication) -> None:
        try:
            for path in passing:
                self._storage.remove(path)
            if more.proven is not None:
                mark_good(self._storage, folder_of(more.proven))
            rotate(self._storage, self.step)
        except OSError as error:
            with suppress(OSError):
                more.say(f"checkpoints that need not stay could not be removed: {error}")

    def _mark(self, stage: int) -> str:
        return f"{self._folder}/{BEGUN}{stage}"

    def _share(self, stage: int) -> str:
        return f"{self._folder}/share-{stage}-{self._word}.json"
