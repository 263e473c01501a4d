"""What a worker on a GPU leaves in its run's folder when it runs out of memory or stalls. On a CPU nothing here runs.

    runs/<name>/<id>/gpu/memory-<replica>-<k>.pickle          at out-of-memory; pytorch.org/memory_viz shows it
                         attempt-<n>-rank-<r>                 at a stall: NCCL's flight recorder, for torchfrtrace

None of it has run on a GPU yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.training.periodic import PeriodicThread

_MEMORY_EVENTS = 100_000
"""Allocations that a memory snapshot remembers with their stacks; each takes a few KB of host memory at most."""

_POLL_S = 0.5

_DUMP_SHARE = 0.5
"""Of the time that an action may take. The supervisor ends the workers when all of it has passed."""


def start_flight_recorder(folder: Path, attempt: int) -> None:
    """Sets the variables with which NCCL's flight recorder records, and writes after NCCL's own timeout, where the user
    has not set another value. They must be set before the process group exists."""
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(_dump_prefix(folder, attempt)))


@contextmanager
def leave_gpu_dumps(
    folder: Path, coord: RankCoord, attempt: int, status: WorkerStatus, with_stacks: bool
) -> Iterator[None]:
    """A context for a worker on a GPU. It writes a memory snapshot when the body runs out of memory, with the stacks of
    allocations if ``with_stacks``, which cost time; and NCCL's records when an action takes too long."""
    folder.mkdir(exist_ok=True)
    if with_stacks:
        torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    dumped_at = -1

    def dump_if_stalled() -> None:
        """Writes NCCL's records once for each action that takes too long."""
        nonlocal dumped_at
        begun = status.actions_begun
        if begun == dumped_at or status.elapsed_s < _DUMP_SHARE * status.current_timeout_s:
            return
        dumped_at = begun
        try:
            records = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            Path(f"{_dump_prefix(folder, attempt)}{coord.rank}").write_bytes(records)
        except (OSError, RuntimeError) as error:  # a full disk, or a build of torch without it
            print(f"NCCL's flight recorder could not be written: {error}", file=sys.stderr, flush=True)

    with PeriodicThread(dump_if_stalled, _POLL_S, "flight recorder"):
        try:
            yield
        except torch.OutOfMemoryError:
            path = folder / f"memory-{coord.replica}-{coord.stage}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            raise


def _dump_prefix(folder: Path, attempt: int) -> Path:
    return folder / f"attempt-{attempt}-rank-"
