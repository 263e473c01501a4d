"""Which checkpoints of a run are whole: every byte of them is read, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from suite.errors import CheckpointError
from suite.training.checkpoint.manifest import Manifest, layer_file
from suite.training.checkpoint.reading import Checkpoint, survey
from suite.training.checkpoint.retention import GOOD
from suite.training.checkpoint.storage import Storage


@dataclass(frozen=True)
class Audit:
    """What was found in one folder."""

    step: int
    manifest: Manifest | None
    good: bool
    """Whether a finite step was done from it."""
    faults: tuple[str, ...]
    """What is wrong, a file each; empty when it is whole."""


def audit(storage: Storage) -> Iterator[Audit]:
    """Yields a word on every folder, the newest step first.

    Raises CheckpointError when the place cannot be listed.
    """
    for folder, found in survey(storage):
        good = GOOD in storage.names(folder)
        if isinstance(found, Checkpoint):
            yield Audit(found.step, found.manifest, good, tuple(_faults(found)))
        else:
            yield Audit(int(folder), None, good, (str(found),))


def _faults(checkpoint: Checkpoint) -> Iterator[str]:
    count = len(checkpoint.manifest.files)
    try:
        checkpoint.check_layers(count)
    except CheckpointError as error:
        yield str(error)
    for layer in range(count):
        if layer_file(layer) in checkpoint.manifest.files:
            try:
                checkpoint.read(layer)
            except CheckpointError as error:
                yield str(error)
