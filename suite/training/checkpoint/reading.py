"""Finding the newest checkpoint that is whole. Each file is read once: the bytes whose digest agreed are those that are
parsed, and nothing but safetensors and JSON is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from suite.errors import CheckpointError
from suite.training.checkpoint.manifest import LARGEST, DamagedError, Manifest, decode, digest, layer_file
from suite.training.checkpoint.storage import BEGUN, MANIFEST, Storage

PARTS = ("value/", "state/")

UNFINISHED = "no manifest, it was never finished"
"""Of a save that was interrupted. Nothing is lost with it: the state before it is that of the checkpoint before."""


@dataclass(frozen=True)
class Checkpoint:
    """One written state of a whole run."""

    storage: Storage
    folder: str
    manifest: Manifest
    layers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """What was read of it, by layer."""

    def __str__(self) -> str:
        return self.storage.shown(self.folder)

    @property
    def step(self) -> int:
        """Steps done when it was written."""
        return self.manifest.step

    @property
    def notes(self) -> dict[str, Any]:
        """What the run wanted back."""
        return self.manifest.notes

    def read(self, layer: int) -> dict[str, Tensor]:
        """Returns one layer's tensors, by ``value/<name>`` and ``state/<parameter>/<name>``.

        Raises CheckpointError, naming the file, when it is not what the manifest says.
        """
        name = layer_file(layer)
        path = f"{self.folder}/{name}"
        try:
            return _tensors(self._bytes(name, path))
        except DamagedError as error:
            raise CheckpointError(f"{self.storage.shown(path)}: {error}") from None
        except FileNotFoundError:
            raise CheckpointError(f"{self.storage.shown(path)}: missing") from None
        except OSError as error:
            raise CheckpointError(str(error)) from None

    def _bytes(self, name: str, path: str) -> bytes:
        wanted = self.manifest.files.get(name)
        if wanted is None:
            raise DamagedError("not in the manifest")
        size = self.storage.size(path)
        if size != wanted.bytes:
            raise DamagedError(f"it has {size} bytes, the manifest says {wanted.bytes}")
        data = self.storage.read(path, size)
        if digest(data) != wanted.sha256:
            raise DamagedError("its SHA-256 is not the manifest's")
        return data

    def check_layers(self, count: int) -> None:
        """Raises CheckpointError when it has not the layers of a model of ``count`` layers."""
        wanted = {layer_file(layer) for layer in range(count)}
        missing, extra = sorted(wanted - self.manifest.files.keys()), sorted(self.manifest.files.keys() - wanted)
        odd = [f"{names[0]}{' to ' + names[-1] if names[1:] else ''} {word}"
               for word, names in (("missing", missing), ("extra", extra)) if names]  # fmt: skip
        if odd:
            raise CheckpointError(
                f"{self} has {len(self.manifest.files)} layers, this model {count} ({', '.join(odd)}); "
                "resume with the settings of the run that wrote it"
            )


def survey(storage: Storage) -> Iterator[tuple[str, Checkpoint | str | CheckpointError]]:
    """Yields every folder's name, the newest step first, with its checkpoint, or with what is wrong with its manifest:
    a CheckpointError when another version of the suite wrote it.

    Raises CheckpointError when the place cannot be listed.
    """
    for folder in folders_of(storage):
        yield folder, _examine(storage, folder)


def _examine(storage: Storage, folder: str, retry: bool = True) -> Checkpoint | str | CheckpointError:
    path = f"{folder}/{MANIFEST}"
    try:
        if not storage.is_folder(folder):
            return "it is not a folder"
        size = storage.size(path)
        if size > LARGEST:
            raise DamagedError(f"it has {size} bytes, no manifest has more than {LARGEST}")
        manifest = decode(storage.read(path, size), storage.shown(path))
        if manifest.step != int(folder):
            raise DamagedError(f"it is of step {manifest.step}")
        return Checkpoint(storage, folder, manifest)
    except FileNotFoundError:
        return _without_manifest(storage, folder, retry)
    except (DamagedError, OSError) as error:
        return f"bad manifest: {error}"
    except CheckpointError as error:
        return error


def folders_of(storage: Storage) -> list[str]:
    """Returns the names of all that may be a checkpoint, usable or not, the newest step first.

    Raises CheckpointError when the place cannot be listed.
    """
    try:
        return storage.folders()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be listed: {error}") from None


def _without_manifest(storage: Storage, folder: str, retry: bool) -> Checkpoint | str | CheckpointError:
    try:
        names = storage.names(folder)
    except OSError as error:
        return str(error)
    if MANIFEST in names and retry:  # a save has published it since
        return _examine(storage, folder, retry=False)
    return UNFINISHED if any(name.startswith(BEGUN) for name in names) else f"its {MANIFEST} is missing"


def list_checkpoints(location: str | Path, say: Callable[[str], None]) -> list[Checkpoint]:
    """Returns the checkpoints below a folder or URL whose manifest is whole, newest first; names the others. None where
    no save was ever finished.

    Raises CheckpointError when there are checkpoints and no manifest is whole, when another version of the suite wrote
    one, or the place cannot be listed.
    """
    bad: list[str] = []
    found = _found(Storage(location), say, bad)
    if bad and not found:
        raise _refusal(location, bad)
    return found


def _refusal(location: str | Path, bad: list[str]) -> CheckpointError:
    none = f"none of the {len(bad)} checkpoints can" if len(bad) > 1 else "the only checkpoint cannot"
    return CheckpointError(
        f"{none} be used ({'; '.join(sorted(bad, reverse=True))}); restore these files, or move {location} away "
        "to train from step 0"
    )


def _found(storage: Storage, say: Callable[[str], None], bad: list[str]) -> list[Checkpoint]:
    """As ``list_checkpoints``; what cannot be used and is no interrupted save goes to ``bad``, with the reason."""
    found = []
    for folder, one in survey(storage):
        if isinstance(one, CheckpointError):
            raise one
        if isinstance(one, Checkpoint):
            found.append(one)
        else:
            say(f"checkpoint {storage.shown(folder)} is not used: {one}")
            if one != UNFINISHED:
                bad.append(f"{storage.shown(folder)}: {one}")
    return found


def newest_valid(
    location: str | Path, layers: Sequence[int], count: int, say: Callable[[str], None]
) -> Checkpoint | None:
    """Returns the newest checkpoint all of whose files are whole, with what this worker needs of it; None where no save
    was ever finished. All workers must call it and get the same.

    Each worker reads its ``layers`` of the model's ``count``; ``say`` hears of what is damaged on the first rank.

    Raises CheckpointError, on all workers, when there are checkpoints and none can be used, or one is of another model
    or version.
    """
    storage = Storage(location)
    offered, bad = _offered(storage, say)
    for folder, manifest in offered:
        checkpoint = Checkpoint(storage, folder, manifest)
        checkpoint.check_layers(count)
        fault = None
        try:
            checkpoint.layers.update((layer, checkpoint.read(layer)) for layer in layers)
        except CheckpointError as error:
            fault = str(error)
        faults: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
        told = sorted({line for line in faults if line})
        if not told:
            return checkpoint
        bad.append(told[0])
        if dist.get_rank() == 0:
            for line in told:
                say(f"checkpoint {checkpoint} is not used: {line}")
    if bad:
        raise _refusal(storage.location, bad)
    return None


def _offered(storage: Storage, say: Callable[[str], None]) -> tuple[list[tuple[str, Manifest]], list[str]]:
    """Returns the checkpoints that the first rank lists, and what is wrong with finished ones that are not among them;
    raises on all what it raises there."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        bad: list[str] = []
        try:
            found = _found(storage, say, bad)
            shared = [([(one.folder, one.manifest) for one in found], bad)]
        except CheckpointError as error:
            shared = [error]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], CheckpointError):
        raise shared[0]
    return shared[0]


def _tensors(data: bytes) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file. Raises DamagedError when the bytes are none."""
    try:
        tensors: dict[str, Tensor] = load(data)
    except Exception as error:  # the parser has errors of several kinds; none must end a run without the file's name
        raise DamagedError(f"it is no safetensors file: {type(error).__name__}: {error}") from None
    odd = sorted(name for name in tensors if not name.startswith(PARTS))
    if odd:
        raise DamagedError(f"it holds {', '.join(odd)}, which a checkpoint has not")
    return tensors
