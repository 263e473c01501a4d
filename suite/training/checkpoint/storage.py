"""Where checkpoints lie: a folder of this machine, or an object store by its URL (fsspec). Flat folders of small trees.

write("00000050/layer-0003.safetensors", data)     a file is there whole or not at all:
    local           a draft, fsync, rename         ... also after a power cut
    object store    one PUT
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from suite.errors import CheckpointError
from suite.training.checkpoint.object_store import open_store

MANIFEST = "manifest.json"

BEGUN = "begun-"
"""How the names of marks begin that a save leaves in its folder until the manifest is there, one a stage."""

PAUSES_S = (0.3, 3.0)
"""Seconds before a read that failed is tried again."""


class Storage:
    """The folders of a run's checkpoints. Every failure of the disk or the store is an OSError that names the file."""

    def __init__(self, location: str | Path) -> None:
        """``location`` is a folder or a URL, such as s3://bucket/runs.

        Raises CheckpointError for a URL of a kind that is not known here, and for a bucket that cannot be found.
        """
        self.location = str(location)
        try:
            self._files, self._root = open_store(self.location)
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointError(f"checkpoints cannot be kept at {self.location}: {error}") from None
        self._local = isinstance(self._files, LocalFileSystem)

    def shown(self, path: str) -> str:
        """Returns how a file is called in a message."""
        return f"{self.location.rstrip('/')}/{path}".rstrip("/")

    def folders(self) -> list[str]:
        """Returns what is named as a save names its folder, the newest step first: each may be a checkpoint.

        Raises OSError when the place is a file, or a link to a folder that is not there.
        """
        if self._local and os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise OSError(f"{self.location} is not a folder, or a link to one that does not exist")
        names = [name for name in self.names("") if re.fullmatch(r"\d{8}|[1-9]\d{8,11}", name)]
        return sorted(names, key=int, reverse=True)

    def is_folder(self, folder: str) -> bool:
        """Returns whether there is such a folder, or a link to one."""
        return bool(self._tried(folder, lambda: self._files.isdir(self._at(folder))))

    def names(self, folder: str) -> set[str]:
        """Returns what lies directly in a folder; nothing in one that is not there."""
        try:
            paths = self._tried(folder, lambda: self._files.ls(self._at(folder), False))
        except FileNotFoundError:
            return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in paths}

    def size(self, path: str) -> int:
        """Returns the bytes of a file. Raises FileNotFoundError when there is none."""
        return int(self._tried(path, lambda: self._files.info(self._at(path)))["size"])

    def read(self, path: str, size: int) -> bytes:
        """Returns a file, or its first ``size`` bytes, so that a file of another size cannot fill the memory."""
        data: bytes = self._tried(path, lambda: self._files.cat_file(self._at(path), end=size)) if size else b""
        return data

    def write(self, path: str, data: bytes) -> None:
        """Puts a file in place, whole or not at all; one of the same name is replaced."""
        with self._named(path):
            if not self._local:
                self._files.pipe_file(self._at(path), data)
                return
            place = Path(self._at(path))
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = place.with_name(f"{place.name}.draft")
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(place)

    def settle(self, folder: str) -> None:
        """Makes the names in a folder, and its own, outlast a power cut. A store's do anyway."""
        if self._local:
            with self._named(folder):
                for path in (Path(self._at(folder)), Path(self._root)):
                    handle = os.open(path, os.O_RDONLY)
                    try:
                        os.fsync(handle)
                    finally:
                        os.close(handle)

    def remove(self, path: str) -> None:
        """Removes a file, if it is there."""
        with self._named(path):
            try:
                self._files.rm_file(self._at(path))
            except FileNotFoundError:
                return

    def remove_folder(self, folder: str) -> None:
        """Removes a checkpoint, its manifest first: a half-deleted folder is no checkpoint. Of an interrupted save the
        marks go last, so that it stays one until it is gone. Of a link, removes the link and nothing that it leads to.
        """
        if not (self._local and os.path.islink(self._at(folder))):
            self.remove(f"{folder}/{MANIFEST}")
            names = self.names(folder)
            marks = {name for name in names if name.startswith(BEGUN)}
            for name in sorted(names - marks) if marks else ():
                self.remove(f"{folder}/{name}")
        with self._named(folder):
            try:
                self._files.rm(self._at(folder), recursive=True)
            except FileNotFoundError:
                return

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def _tried(self, path: str, read: Callable[[], Any]) -> Any:
        """Returns what a read gives, tried again where the store fails: one failure of a network ends no run."""
        for pause in PAUSES_S:
            try:
                with self._named(path):
                    return read()
            except FileNotFoundError:
                raise
            except OSError:
                time.sleep(pause)
        with self._named(path):
            return read()

    @contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Each store's driver has errors of its own; all become OSErrors with the file's name."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            told = error.strerror if isinstance(error, OSError) else None
            raise OSError(f"{self.shown(path)}: {told or f'{type(error).__name__}: {error}'}") from error
