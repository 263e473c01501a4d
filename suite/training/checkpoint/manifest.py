"""The manifest: the files of a checkpoint, with their sizes and digests.

    {"files": {"layer-0000.5f0c82d1b3aa.safetensors": {"bytes": 1184, "sha256": "9f..."}, ...},
     "format": 2, "notes": {...}, "step": 50, "written": 1760000000.0,
     "seal": SHA-256 of all the rest}

It has exactly one encoding (sorted, indented), and any other bytes are rejected. ``format`` and ``seal`` keep their
meaning in every format, so a newer format is not mistaken for a damaged file.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from suite.errors import CheckpointError

FORMAT = 2

LAYER = "layer-"
_LAYER_FILE = re.compile(rf"({LAYER}\d{{4,}})(?:\.\w+)?\.safetensors")
"""Format 2 began without the id of the save."""

LARGEST = 2**26
"""Largest manifest in bytes: enough for half a million layers."""


class DamagedError(Exception):
    """A damaged file of a checkpoint. The message follows the file's name."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class File(_Record):
    """Expected size and digest of a file."""

    bytes: int = Field(ge=0)
    sha256: str


class Manifest(_Record):
    format: int = FORMAT
    step: int = Field(ge=0)
    """Steps done when it was written. Sampler, random numbers and learning rate depend on the step alone."""
    written: float
    """Seconds since 1970."""
    files: dict[str, File] = Field(min_length=1)
    notes: dict[str, Any]
    """State that the run restores: units seen, its name, seed, wandb run and vocabulary."""

    @field_validator("notes")
    @classmethod
    def _usable(cls, notes: dict[str, Any]) -> dict[str, Any]:
        units, run = notes.get("units", 0), notes.get("wandb_run")
        if type(units) is not int or units < 0:
            raise ValueError(f"units is {units!r}, not a count")
        if run is not None and not isinstance(run, str):
            raise ValueError(f"wandb_run is {run!r}, not a name")
        return notes

    def file_of(self, layer: int) -> str | None:
        """Returns the name of a layer's file; None if it has none."""
        return self._by_layer.get(f"{LAYER}{layer:04d}")

    def size_of(self, layer: int) -> int:
        """Returns the bytes of the file of a layer that it has."""
        return self.files[self._by_layer[f"{LAYER}{layer:04d}"]].bytes

    @cached_property
    def _by_layer(self) -> dict[str, str]:
        return {found[1]: name for name in self.files if (found := _LAYER_FILE.fullmatch(name))}

    def encode(self) -> bytes:
        return _sealed(self.model_dump(mode="json"))


def decode(data: bytes, name: str) -> Manifest:
    """Decodes what ``encode`` wrote. ``name`` is for messages.

    Raises DamagedError for any other bytes, and CheckpointError when another version of the suite wrote it.
    """
    try:
        values = json.loads(data)
        intact = isinstance(values, dict) and "seal" in values and _sealed(values) == data
    except (ValueError, RecursionError):
        raise DamagedError("it is not a manifest") from None
    if not intact:
        raise DamagedError("its seal does not match its content")
    version = values.get("format")
    if version != FORMAT:
        older = isinstance(version, int) and version < FORMAT
        raise CheckpointError(
            f"{name} has format {repr(version)[:40]}, written by {'an older' if older else 'a newer'} version of the "
            f"suite; this version reads format {FORMAT}; resume with the version that wrote it"
        )
    try:
        return Manifest.model_validate({key: value for key, value in values.items() if key != "seal"})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DamagedError(f"its field {place}: {first['msg']}") from None


def layer_file(layer: int, save_id: str) -> str:
    """Returns the name of one layer's file. It has the id of the save: a driver that is late overwrites no file of the
    one that followed it."""
    return f"{LAYER}{layer:04d}.{save_id}.safetensors"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sealed(values: dict[str, Any]) -> bytes:
    body = {key: value for key, value in values.items() if key != "seal"}
    seal = digest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "seal": seal}, sort_keys=True, indent=1).encode()
