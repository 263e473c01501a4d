"""Sends prepared data to nodes that do not have it, file by file in chunks to limit memory.

driver's node    .cache/text-.../   --- chunks of 8 MiB, one at a time per node --->   node
node             <folder>.draft-...   renamed to <folder> when complete
"""

from __future__ import annotations

import glob
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from experiments.base.hints import command
from launch.ray_nodes import own_node, run_on_all, start_on
from suite.errors import WorkerError
from suite.paths import safe_join
from suite.pipeline.planning.placement import Node

CHUNK_BYTES = 8 * 2**20

START_S = 60.0
"""Seconds for the Ray processes to start on all nodes."""

LEAST_BYTES_PER_S = 1e7
"""Minimum rate of a transfer, over all its nodes; a slower one fails."""

OLD_S = 86400.0
"""Seconds without a change after which a draft is removed: its driver was killed."""


class ChunkReader:
    """A Ray actor on the driver's node: reads the folder for all nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str, offset: int) -> bytes:
        """Returns at most CHUNK_BYTES of a file."""
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)


def send_folder(folder: Path, nodes: Sequence[Node]) -> None:
    """Sends a folder's files to the nodes that do not have it. Raises WorkerError with the node's name when a node
    fails or the transfer is slower than LEAST_BYTES_PER_S."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    limit_s = START_S + len(nodes) * sum(sizes.values()) / LEAST_BYTES_PER_S
    late = f"it is not complete after {limit_s:.0f} s, slower than {LEAST_BYTES_PER_S / 1e6:.0f} MB/s"
    reader = start_on(own_node(), ChunkReader, folder)
    fault = not_received(f"the prepared data {folder}")
    run_on_all(nodes, receive_folder, folder, sizes, reader, limit_s=limit_s, fault=fault, late=late)


def receive_folder(folder: Path, sizes: Mapping[str, int], reader: Any) -> None:
    """A Ray task on a node: writes a folder atomically, unless it exists. ``sizes`` are the bytes of each file that the
    ``reader`` has. Raises PathError for a name that leads out of the folder."""
    import ray

    _remove_old_drafts(folder)
    if folder.exists():
        return
    draft = folder.with_name(f"{folder.name}.draft-{uuid4().hex}")
    try:
        for name, size in sizes.items():
            path = safe_join(draft, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for offset in range(0, size, CHUNK_BYTES):
                    file.write(ray.get(reader.read.remote(name, offset)))
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another task was first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _remove_old_drafts(folder: Path) -> None:
    for draft in folder.parent.glob(f"{glob.escape(folder.name)}.draft-*"):
        with suppress(OSError):  # another task may remove it at the same time
            changed = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
            if changed < time.time() - OLD_S:
                shutil.rmtree(draft, ignore_errors=True)


def not_received(what: str) -> Callable[[Node, str], WorkerError]:
    """Returns a function that returns the error of a node that could not receive something: no PlacementError, because
    the next attempt may use other nodes."""
    return lambda node, why: WorkerError(
        f"node {node.name} could not receive {what}: {why}; run `{command('doctor')}`, remove the node, or use "
        "storage that all nodes share (GPIPE_STORAGE)"
    )
