"""Prepared data sent to nodes that lack it: file by file in chunks, so that neither side holds more than a few.

driver's node    .cache/text-.../   --- 8 MiB, two under way a node --->   <folder>.draft-...  renamed when whole
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

from launch.cluster.causes import first_line
from suite.errors import WorkerError
from suite.paths import safe_join
from suite.pipeline.placement import Node

CHUNK_BYTES = 8 * 2**20

START_S = 60.0
"""Seconds for the receiving process of Ray to start on each node."""

LEAST_BYTES_PER_S = 1e7
"""Bytes a second that a transfer must reach, all its nodes together."""

DISCARD_S = 10.0
"""Seconds for a node to remove a draft after a failure."""

OLD_S = 86400.0
"""Seconds after which a draft that nothing was added to is that of a driver that was killed."""

MAX_IN_FLIGHT = 2


class FolderReceiver:
    """Runs on a node as an actor of Ray: writes a folder, whole or not at all; one that is there stays."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._draft = self._folder.with_name(f"{self._folder.name}.draft-{uuid4().hex}")
        self._remove_old_drafts()

    def _remove_old_drafts(self) -> None:
        for draft in self._folder.parent.glob(f"{glob.escape(self._folder.name)}.draft-*"):
            with suppress(OSError):  # another receiver removes it, too
                changed = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
                if changed < time.time() - OLD_S:
                    shutil.rmtree(draft, ignore_errors=True)

    def has_folder(self) -> bool:
        """Whether the folder is there already."""
        return self._folder.exists()

    def append(self, name: str, data: bytes) -> None:
        """Adds to a file of the draft. Raises PathError for a name that leads out of it."""
        path = safe_join(self._draft, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def finish(self) -> None:
        """Puts the draft in the folder's place, unless another worker was first."""
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
    """Sends a folder's files to the receivers that lack it. Raises WorkerError, naming the node, when one fails or the
    whole takes longer than its bytes should."""
    import ray

    starting = {receiver.has_folder.remote(): receiver for receiver in receivers}
    until = time.monotonic() + START_S
    late = f"its process of Ray did not start in {START_S:.0f} s"
    has = {receiver: _get(call, receivers[receiver], until, folder, late) for call, receiver in starting.items()}
    lacking = [receiver for receiver in receivers if not has[receiver]]
    if not lacking:
        return
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    until = time.monotonic() + START_S + len(lacking) * total / LEAST_BYTES_PER_S
    in_flight: list[dict[Any, Any]] = []
    try:
        for name, data in _chunks(folder):
            chunk = ray.put(data)
            in_flight.append({receiver.append.remote(name, chunk): receiver for receiver in lacking})
            if len(in_flight) >= MAX_IN_FLIGHT:
                _wait(in_flight.pop(0), receivers, until, folder)
        in_flight.append({receiver.finish.remote(): receiver for receiver in lacking})
        while in_flight:
            _wait(in_flight.pop(0), receivers, until, folder)
    except BaseException:
        with suppress(Exception):
            ray.wait([receiver.discard.remote() for receiver in lacking], num_returns=len(lacking), timeout=DISCARD_S)
        raise


def _chunks(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            data = file.read(CHUNK_BYTES)
            while True:  # an empty file is a chunk, too
                yield path.relative_to(folder).as_posix(), data
                if not (data := file.read(CHUNK_BYTES)):
                    break


def _wait(calls: Mapping[Any, Any], receivers: Mapping[Any, Node], until: float, folder: Path) -> None:
    late = f"it takes less than {LEAST_BYTES_PER_S / 1e6:.0f} MB a second"
    for call, receiver in calls.items():
        _get(call, receivers[receiver], until, folder, late)


def _get(call: Any, node: Node, until: float, folder: Path, late: str) -> Any:
    """Returns what a node answers. Raises WorkerError when it fails, and for the reason ``late`` after ``until``."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(call, timeout=max(0.0, until - time.monotonic()))
    except GetTimeoutError:
        why = late
    except RayError as error:
        why = first_line(getattr(error, "cause", None) or error)
    raise WorkerError(
        f"node {node.name} could not take the prepared data {folder}: {why}; put the cache on storage that all nodes "
        "share (GPIPE_STORAGE), or see `make doctor`"
    ) from None


def receiver_on(node: Node, folder: Path) -> Any:
    """Starts a receiver on a node and returns it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(FolderReceiver).options(num_cpus=0, scheduling_strategy=where).remote(str(folder))
