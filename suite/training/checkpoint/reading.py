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
from suite.training.checkpoint.storage import MANIFEST, Storage

PARTS = ("value/", "state/")

UNFINISHED = "no manifest, it was never finished"


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
    try:
        folders = storage.folders()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be listed: {error}") from None
    for folder in folders:
        path = f"{folder}/{MANIFEST}"
        try:
            size = storage.size(path)
            if size > LARGEST:
                raise DamagedError(f"it has {size} bytes, no manifest has more than {LARGEST}")
            manifest = decode(storage.read(path, size), storage.shown(path))
            if manifest.step != int(folder):
                raise DamagedError(f"it is of step {manifest.step}")
            yield folder, Checkpoint(storage, folder, manifest)
        except FileNotFoundError:
            yield folder, UNFINISHED
        except (DamagedError, OSError) as error:
            yield folder, f"bad manifest: {error}"
        except CheckpointError as error:
            yield folder, error


def list_checkpoints(location: str | Path, say: Callable[[str], None]) -> list[Checkpoint]:
    """Returns the checkpoints below a folder or URL whose manifest is whole, newest first; names the others.

    Raises CheckpointError when another version of the suite wrote one, or the place cannot be listed.
    """
    return _found(Storage(location), say, [])


def _found(storage: Storage, say: Callable[[str], None], bad: list[str]) -> list[Checkpoint]:
    """As ``list_checkpoints``; what is wrong with manifests that are there goes to ``bad``."""
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
    """Returns the newest checkpoint all of whose files are whole, with what this worker needs of it; None where none
    was finished, or a first one that is damaged: before it is the beginning. All workers must call it and get the same.

    Each worker reads its ``layers`` of the model's ``count``; ``say`` hears of what is damaged on the first rank.

    Raises CheckpointError, on all workers, when all of several are damaged, or one is of another model or version.
    """
    storage = Storage(location)
    offered, bad = _offered(storage, say)
    first = bad[0] if bad else ""
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
        first = first or told[0]
        if dist.get_rank() == 0:
            for line in told:
                say(f"checkpoint {checkpoint} is not used: {line}")
    if (count := len(offered) + len(bad)) > 1:
        raise CheckpointError(
            f"none of the {count} checkpoints in {storage.location} is whole ({first}); bring the files back, "
            "or start a new run"
        )
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
