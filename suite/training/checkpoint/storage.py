"""Where checkpoints are stored: a local folder, or an object store by its URL (fsspec).

write("00000050/layer-0003.safetensors", data)     is atomic:
    local           draft file, fsync, rename      ... also in a power cut
    object store    one PUT
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from suite.errors import CheckpointError
from suite.paths import hide_secrets, replace_content, sync_folder
from suite.training.checkpoint.object_store import open_store

MANIFEST = "manifest.json"

BEGUN = "begun-"
"""Prefix of the start markers, one per worker that writes. A save keeps them until the manifest is published."""

PAUSES_S = (0.3, 3.0)
"""Seconds before each retry of a failed read."""


class Storage:
    """The checkpoint folders of a run. Every failure of the disk or store is an OSError that names the file."""

    def __init__(self, location: str | Path) -> None:
        """``location`` is a folder or a URL, such as s3://bucket/runs.

        Raises CheckpointError for an unknown kind of URL, and for a bucket that cannot be found.
        """
        self.location = str(location)
        try:
            self._files, self._root = open_store(self.location)
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointError(f"cannot store checkpoints at {self.shown('')}: {hide_secrets(str(error))}") from None
        self._local = isinstance(self._files, LocalFileSystem)

    def shown(self, path: str) -> str:
        """Returns a file's name for messages, without secrets of the URL."""
        return f"{hide_secrets(self.location).rstrip('/')}/{path}".rstrip("/")

    def folders(self) -> list[str]:
        """Returns the entries named like a checkpoint, newest step first.

        Raises OSError when the location is a file, or a link to a folder that does not exist.
        """
        if self._local and os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise OSError(f"{self.shown('')} is not a folder, or a link to one that does not exist")
        names = [name for name in self.names("") if re.fullmatch(r"\d{8}|[1-9]\d{8,11}", name)]
        return sorted(names, key=int, reverse=True)

    def is_folder(self, folder: str) -> bool:
        """Whether the folder, or a link to it, exists. fsspec's own ``isdir`` is False if storage does not answer."""
        try:
            return bool(self._retry(folder, lambda: self._files.info(self._at(folder)))["type"] == "directory")
        except FileNotFoundError:
            return False

    def names(self, folder: str) -> set[str]:
        """Returns the names of a folder's entries; none for a missing folder."""
        try:
            paths = self._retry(folder, lambda: self._files.ls(self._at(folder), False))
        except FileNotFoundError:
            return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in paths}

    def size(self, path: str) -> int:
        """Returns the size of a file in bytes. Raises FileNotFoundError for a missing file."""
        return int(self._retry(path, lambda: self._files.info(self._at(path)))["size"])

    def read(self, path: str, size: int) -> bytes:
        """Returns at most the first ``size`` bytes of a file, so that an oversized file cannot fill the memory."""
        return self._retry(path, lambda: self._files.cat_file(self._at(path), end=size)) if size else b""

    def write(self, path: str, data: bytes) -> None:
        """Writes a file atomically; replaces one of the same name."""
        with self._naming(path):
            if not self._local:
                self._files.pipe_file(self._at(path), data)
                return
            target = Path(self._at(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_content(target, data)

    def settle(self, folder: str) -> None:
        """Syncs a folder and its parent, so that their entries survive a power cut. A no-op for an object store."""
        if self._local:
            with self._naming(folder):
                for path in (Path(self._at(folder)), Path(self._root)):
                    sync_folder(path)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError), self._naming(path):
            self._files.rm_file(self._at(path))

    def remove_folder(self, folder: str) -> None:
        """Removes a checkpoint, its manifest first, so that a half-deleted folder is no checkpoint. Of an interrupted
        save, removes the start markers last, so that it stays recognizable. Of a link, removes only the link.
        """
        if not (self._local and os.path.islink(self._at(folder))):
            self.remove(f"{folder}/{MANIFEST}")
            names = self.names(folder)
            marks = {name for name in names if name.startswith(BEGUN)}
            for name in sorted(names - marks) if marks else ():
                self.remove(f"{folder}/{name}")
        with suppress(FileNotFoundError), self._naming(folder):
            self._files.rm(self._at(folder), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def _retry(self, path: str, read: Callable[[], Any]) -> Any:
        """Returns the result of ``read``, retried when the store fails: one network failure must not end a run."""
        for pause in PAUSES_S:
            try:
                with self._naming(path):
                    return read()
            except FileNotFoundError:
                raise
            except OSError:
                time.sleep(pause)
        with self._naming(path):
            return read()

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Converts the errors of each store's driver to OSErrors with the file's name."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            message = error.strerror if isinstance(error, OSError) else None
            reason = message or hide_secrets(f"{type(error).__name__}: {error}")
            raise OSError(f"{self.shown(path)}: {reason}") from error
