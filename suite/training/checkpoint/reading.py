"""Finds the newest valid checkpoint, reads its layers, and verifies all checkpoints.

Each file is read once, so the bytes with the right digest are the bytes that are parsed. Only safetensors and JSON are
parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from suite.errors import CheckpointError, StorageError
from suite.exchange import all_gather, broadcast
from suite.log import Log
from suite.paths import hide_secrets
from suite.training.checkpoint.manifest import LARGEST, DamagedError, Manifest, decode, digest
from suite.training.checkpoint.readers import Readers
from suite.training.checkpoint.retention import ABANDONED, KEEP_BEST, KEEP_GOOD
from suite.training.checkpoint.storage import BEGUN, MANIFEST, Storage

PARTS = ("value/", "state/")

REMEDY = "change the model back to that of the run, or start a new run"

Select = Callable[[list["Checkpoint"]], list["Checkpoint"]]
"""Returns the checkpoints to try, in order."""

UNFINISHED = "no manifest, it was never finished"
"""Reason for an interrupted save. It loses nothing: the previous checkpoint is the last finished one."""


@dataclass(frozen=True)
class Checkpoint:
    storage: Storage
    folder: str
    manifest: Manifest
    good: bool = False
    """Whether a finite step followed it."""
    best: bool = False
    """Whether no validation before it was better."""
    abandoned: bool = False
    """Whether the run continued from an earlier one."""
    best_step: int | None = None
    """The step of the newest best one up to this one, where it was listed with others."""
    layers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """The tensors read so far, by layer."""

    def __str__(self) -> str:
        return self.storage.shown(self.folder)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def notes(self) -> dict[str, Any]:
        return self.manifest.notes

    def read(self, layer: int) -> dict[str, Tensor]:
        """Returns a layer's tensors, by ``value/<name>`` and ``state/<parameter>/<name>``. Raises as ``read_file``."""
        return self.read_file(layer)[1]

    def read_file(self, layer: int) -> tuple[bytes, dict[str, Tensor]]:
        """Returns one layer's file, and its tensors.

        Raises CheckpointError, naming the file, when it does not match the manifest, and StorageError when it cannot be
        read now.
        """
        name = self.manifest.file_of(layer)
        path = f"{self.folder}/{name or f'the file of layer {layer}'}"
        try:
            if name is None:
                raise DamagedError("not in the manifest")
            expected, size = self.manifest.files[name], self.storage.size(path)
            if size != expected.bytes:
                raise DamagedError(f"it has {size} bytes, the manifest says {expected.bytes}")
            data = self.storage.read(path, size)
            if digest(data) != expected.sha256:
                raise DamagedError("its SHA-256 does not match the manifest")
            return data, _tensors(data)
        except DamagedError as error:
            raise CheckpointError(f"{self.storage.shown(path)}: {error}") from None
        except FileNotFoundError:
            raise CheckpointError(f"{self.storage.shown(path)}: missing") from None
        except OSError as error:
            raise _unanswered(error) from None

    def read_header(self, layer: int) -> dict[str, Tensor]:
        """Returns one layer's tensors on the meta device. Reads only the beginning of its file, and checks no digest.

        Raises ValueError or OSError for a damaged or missing file.
        """
        path = f"{self.folder}/{self.manifest.file_of(layer)}"
        length = int.from_bytes(self.storage.read(path, 8), "little")
        header = json.loads(self.storage.read(path, 8 + min(length, LARGEST))[8:])
        header.pop("__metadata__", None)
        return {
            name: torch.empty(told["shape"], dtype=_dtype(told["dtype"]), device="meta")
            for name, told in header.items()
        }

    def check_layers(self, count: int) -> None:
        """Raises CheckpointError unless it has exactly the layers of a model of ``count`` layers."""
        found = {layer: self.manifest.file_of(layer) for layer in range(count)}
        missing = [f"layer {layer}" for layer, name in found.items() if name is None]
        extra = sorted(self.manifest.files.keys() - set(found.values()))
        differences = [
            f"{names[0]}{' to ' + names[-1] if names[1:] else ''} {word}"
            for word, names in (("missing", missing), ("extra", extra))
            if names
        ]
        if differences:
            raise CheckpointError(
                f"{self} has {len(self.manifest.files)} layers, this model {count} ({', '.join(differences)}); "
                + REMEDY
            )


def _dtype(name: str) -> torch.dtype:
    """Returns the type that safetensors calls F32, BF16, I64, ..."""
    kind, bits = re.fullmatch(r"([A-Z]+)(\d*)", name).groups()  # type: ignore[union-attr]
    words = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "BOOL": "bool"}
    return getattr(torch, words[kind] + bits)


def _unanswered(error: OSError) -> StorageError:
    return StorageError(f"{error}; nothing was changed; resume when the storage answers, or choose another checkpoint")


def current(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Returns those that are not abandoned."""
    return [checkpoint for checkpoint in checkpoints if not checkpoint.abandoned]


def examine(storage: Storage, folder: str, retry: bool = True) -> Checkpoint | str | CheckpointError:
    """Returns the checkpoint in a folder, or the fault of its manifest: a CheckpointError when another version of the
    suite wrote it or it cannot be read now, else a text."""
    path = f"{folder}/{MANIFEST}"
    try:
        if not storage.is_folder(folder):
            return "it is not a folder"
        size = storage.size(path)
        if size > LARGEST:
            raise DamagedError(f"it has {size} bytes, the limit for a manifest is {LARGEST}")
        manifest = decode(storage.read(path, size), storage.shown(path))
        if manifest.step != int(folder):
            raise DamagedError(f"it is of step {manifest.step}")
        names = storage.names(folder)
        return Checkpoint(storage, folder, manifest, KEEP_GOOD in names, KEEP_BEST in names, ABANDONED in names)
    except FileNotFoundError:
        return _without_manifest(storage, folder, retry)
    except DamagedError as error:
        return f"bad manifest: {error}"
    except OSError as error:
        return _unanswered(error)
    except CheckpointError as error:
        return error


def folders_of(storage: Storage) -> list[str]:
    """Returns the names of all possible checkpoints, valid or not, newest step first.

    Raises CheckpointError when the location cannot be listed.
    """
    try:
        return storage.folders()
    except OSError as error:
        raise StorageError(f"checkpoints cannot be listed: {error}") from None


def _without_manifest(storage: Storage, folder: str, retry: bool) -> Checkpoint | str | CheckpointError:
    try:
        names = storage.names(folder)
    except OSError as error:
        return _unanswered(error)
    if MANIFEST in names and retry:  # a save has published it since
        return examine(storage, folder, retry=False)
    return UNFINISHED if any(name.startswith(BEGUN) for name in names) else f"its {MANIFEST} is missing"


@dataclass(frozen=True)
class Audit:
    """The result for one folder."""

    step: int
    checkpoint: Checkpoint | None
    """None without a valid manifest."""
    faults: tuple[str, ...]
    """What is wrong, one entry per file; empty for a valid checkpoint."""


def audit(storage: Storage) -> Iterator[Audit]:
    """Yields the result for every folder, newest step first. Reads every byte, without a model.

    Raises CheckpointError when the location cannot be listed.
    """
    for folder in folders_of(storage):
        entry = examine(storage, folder)
        if isinstance(entry, Checkpoint):
            yield Audit(entry.step, entry, tuple(_faults(entry)))
        else:
            yield Audit(int(folder), None, (str(entry),))


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


def list_checkpoints(location: str | Path, log: Log) -> list[Checkpoint]:
    """Returns the checkpoints below a folder or URL that have a valid manifest, newest first, and logs the others.
    Empty if no save ever finished.

    Raises CheckpointError when checkpoints exist but none has a valid manifest, when another version of the suite wrote
    one, or when the location cannot be listed.
    """
    bad: list[str] = []
    checkpoints = _with_manifest(Storage(location), log, bad)
    if bad and not checkpoints:
        raise _none_usable(location, bad)
    return checkpoints


def _none_usable(location: str | Path, bad: list[str]) -> CheckpointError:
    none = f"none of the {len(bad)} checkpoints can" if len(bad) > 1 else "the only checkpoint cannot"
    return CheckpointError(
        f"{none} be used ({'; '.join(sorted(bad, reverse=True))}); restore these files, or move "
        f"{hide_secrets(str(location))} away to train anew"
    )


def _with_manifest(storage: Storage, log: Log, bad: list[str]) -> list[Checkpoint]:
    """Like ``list_checkpoints``; adds to ``bad`` the unusable ones that are no interrupted saves, with the reason."""
    checkpoints = []
    for folder in folders_of(storage):
        entry = examine(storage, folder)
        if isinstance(entry, CheckpointError):
            raise entry
        if isinstance(entry, Checkpoint):
            checkpoints.append(entry)
        else:
            log(f"checkpoint {storage.shown(folder)} is not used: {entry}")
            if entry != UNFINISHED:
                bad.append(f"{storage.shown(folder)}: {entry}")
    return checkpoints


def newest_valid(
    location: str | Path,
    layers: Sequence[int],
    count: int,
    log: Log,
    select: Select = current,
    readers: Readers | None = None,
) -> Checkpoint | None:
    """Returns the newest valid checkpoint with this worker's layers; None if no save ever finished. All workers must
    call it and get the same checkpoint.

    Each worker gets its ``layers`` of the model's ``count``; ``readers`` share the reading. Rank 0 logs damaged
    checkpoints. ``select`` returns those to try, in order, from those with a valid manifest, newest first; by default
    all but abandoned ones.

    Raises CheckpointError, on all workers, when checkpoints exist but none is valid, or one is of another model or
    version; StorageError when one of them cannot read a checkpoint now, because an older one would be the wrong choice.
    """
    storage = Storage(location)
    candidates, bad = _candidates(storage, log, select)
    for checkpoint in candidates:
        checkpoint.check_layers(count)
        fault, unanswered, files = "", False, dict[int, bytes]()
        try:
            for layer in readers.own(layers) if readers is not None else layers:
                data, checkpoint.layers[layer] = checkpoint.read_file(layer)
                if readers is not None:
                    files[layer] = data
        except CheckpointError as error:
            fault, unanswered = str(error), isinstance(error, StorageError)
        faults = all_gather([fault, unanswered])
        if errors := sorted(line for line, is_unanswered in faults if is_unanswered):
            raise StorageError(errors[0])
        messages = sorted({line for line, _ in faults if line})
        if not messages:
            if readers is not None:
                sizes = {layer: checkpoint.manifest.size_of(layer) for layer in layers}
                checkpoint.layers.update((layer, _tensors(data)) for layer, data in readers.exchange(sizes, files))
            return checkpoint
        bad.append(messages[0])
        if dist.get_rank() == 0:
            for line in messages:
                log(f"checkpoint {checkpoint} is not used: {line}")
    if bad:
        raise _none_usable(storage.location, bad)
    return None


def _candidates(storage: Storage, log: Log, select: Select) -> tuple[list[Checkpoint], list[str]]:
    """Returns the checkpoints that rank 0 lists, each with the step of the best one up to it, and the faults of
    finished but unusable ones. An error of rank 0 is raised on all workers."""
    found: list[tuple[str, dict[str, Any], int | None]] = []
    bad: list[str] = []
    fault, unanswered = "", False
    if dist.get_rank() == 0:
        try:
            listed = _with_manifest(storage, log, bad)
            bests = [checkpoint.step for checkpoint in listed if checkpoint.best]
            for checkpoint in select(listed):
                best_step = next((at for at in bests if at <= checkpoint.step), None)
                found.append((checkpoint.folder, checkpoint.manifest.model_dump(mode="json"), best_step))
        except CheckpointError as error:
            fault, unanswered = str(error), isinstance(error, StorageError)
    found, bad, fault, unanswered = broadcast([found, bad, fault, unanswered])
    if fault:
        raise StorageError(fault) if unanswered else CheckpointError(fault)
    candidates = [
        Checkpoint(storage, folder, Manifest.model_validate(manifest), best_step=best_step)
        for folder, manifest, best_step in found
    ]
    return candidates, bad


def _tensors(data: bytes) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file. Raises DamagedError for any other bytes."""
    try:
        tensors: dict[str, Tensor] = load(data)
    except Exception as error:  # the parser raises several error types; each must get the file's name
        raise DamagedError(f"it is not a safetensors file: {type(error).__name__}: {error}") from None
    if unknown := sorted(name for name in tensors if not name.startswith(PARTS)):
        raise DamagedError(f"it has unexpected tensors: {', '.join(unknown)}")
    return tensors
