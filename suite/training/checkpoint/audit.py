"""Verifies the checkpoints of a run: reads every byte of them, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from suite.errors import CheckpointError
from suite.training.checkpoint.manifest import Manifest
from suite.training.checkpoint.reading import Checkpoint, iter_checkpoints
from suite.training.checkpoint.retention import KEEP_BEST, KEEP_GOOD
from suite.training.checkpoint.storage import Storage


@dataclass(frozen=True)
class Audit:
    """The result for one folder."""

    step: int
    manifest: Manifest | None
    good: bool
    """Whether a finite step followed it."""
    best: bool
    """Whether no validation before it was better; of several such, the newest counts."""
    abandoned: bool
    """Whether the run continued from an earlier one."""
    faults: tuple[str, ...]
    """What is wrong, one entry per file; empty for a valid checkpoint."""


def audit(storage: Storage) -> Iterator[Audit]:
    """Yields the result for every folder, newest step first.

    Raises CheckpointError when the location cannot be listed.
    """
    for folder, entry in iter_checkpoints(storage):
        names = storage.names(folder)
        good, best = KEEP_GOOD in names, KEEP_BEST in names
        if isinstance(entry, Checkpoint):
            yield Audit(entry.step, entry.manifest, good, best, entry.abandoned, tuple(_faults(entry)))
        else:
            yield Audit(int(folder), None, good, best, False, (str(entry),))


def _faults(checkpoint: Checkpoint) -> Iterator[str]:
    count = len(checkpoint.manifest.files)
    try:
        checkpoint.check_layers(count)
    except CheckpointError as error:
        yield str(error)
    for layer in range(count):
        if checkpoint.manifest.file_of(layer) is not None:
            try:
                checkpoint.read(layer)
            except CheckpointError as error:
                yield str(error)
