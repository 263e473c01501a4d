"""Sends prepared data to nodes that do not have it, file by file in chunks to limit memory.

driver's node    .cache/text-.../   --- chunks of 8 MiB, at most two in flight per node --->   node
node             <folder>.draft-...   renamed to <folder> when complete
"""

from __future__ import annotations

import glob
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from experiments.base.hints import command
from launch.ray_nodes import collect, start_on
from suite.errors import WorkerError
from suite.paths import safe_join
from suite.pipeline.planning.placement import Node

CHUNK_BYTES = 8 * 2**20

START_S = 60.0
"""Seconds for the receiver's Ray process to start on each node."""

LEAST_BYTES_PER_S = 1e7
"""Minimum rate of a transfer, over all its nodes; a slower one fails."""

DISCARD_S = 10.0
"""Seconds for a node to remove a draft after a failure."""

OLD_S = 86400.0
"""Seconds without a change after which a draft is removed: its driver was killed."""

MAX_IN_FLIGHT = 2


class FolderReceiver:
    """A Ray actor on a node: writes a folder atomically, unless it exists."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._draft = self._folder.with_name(f"{self._folder.name}.draft-{uuid4().hex}")
        self._remove_old_drafts()

    def _remove_old_drafts(self) -> None:
        for draft in self._folder.parent.glob(f"{glob.escape(self._folder.name)}.draft-*"):
            with suppress(OSError):  # another receiver may remove it at the same time
                changed = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
                if changed < time.time() - OLD_S:
                    shutil.rmtree(draft, ignore_errors=True)

    def has_folder(self) -> bool:
        """Whether the folder already exists."""
        return self._folder.exists()

    def append(self, name: str, data: bytes) -> None:
        """Appends to a file of the draft. Raises PathError for a name that leads out of it."""
        path = safe_join(self._draft, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def finish(self) -> None:
        """Renames the draft to the folder, unless another receiver was first."""
        try:
            self._draft.rename(self._folder)
        except OSError:
            self.discard()
            if not self._folder.exists():
                raise

    def discard(self) -> None:
        """Removes the draft."""
        shutil.rmtree(self._draft, ignore_errors=True)


def send_folder(folder: Path, receivers: Mapping[Any, Node]) -> None:
    """Sends a folder's files to the receivers that do not have it. Raises WorkerError with the node's name when a
    receiver fails or the transfer is slower than LEAST_BYTES_PER_S."""
    import ray

    def wait(calls: dict[Any, Any], until: float, late: str) -> dict[Any, Any]:
        answers, failures = collect(calls, max(0.0, until - time.monotonic()), late)
        for receiver, why in failures.items():
            raise WorkerError(
                f"node {receivers[receiver].name} could not receive the prepared data {folder}: {why}; put the cache "
                "on storage that all nodes share (GPIPE_STORAGE), or run `" + command("doctor") + "`"
            )
        return answers

    late = f"its Ray process did not start within {START_S:.0f} s"
    has = wait({receiver: receiver.has_folder.remote() for receiver in receivers}, time.monotonic() + START_S, late)
    missing = [receiver for receiver in receivers if not has[receiver]]
    if not missing:
        return
    total_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    until = time.monotonic() + START_S + len(missing) * total_bytes / LEAST_BYTES_PER_S
    late = f"the transfer is slower than {LEAST_BYTES_PER_S / 1e6:.0f} MB/s"
    in_flight: list[dict[Any, Any]] = []
    try:
        for name, data in _chunks(folder):
            chunk = ray.put(data)
            in_flight.append({receiver: receiver.append.remote(name, chunk) for receiver in missing})
            if len(in_flight) >= MAX_IN_FLIGHT:
                wait(in_flight.pop(0), until, late)
        in_flight.append({receiver: receiver.finish.remote() for receiver in missing})
        while in_flight:
            wait(in_flight.pop(0), until, late)
    except BaseException:
        with suppress(Exception):
            collect({receiver: receiver.discard.remote() for receiver in missing}, DISCARD_S)
        raise


def _chunks(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            data = file.read(CHUNK_BYTES)
            while True:  # an empty file is one empty chunk
                yield path.relative_to(folder).as_posix(), data
                if not (data := file.read(CHUNK_BYTES)):
                    break


def receiver_on(node: Node, folder: Path) -> Any:
    """Starts a receiver on a node and returns it."""
    return start_on(node.id, FolderReceiver, str(folder))
