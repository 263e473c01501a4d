"""A folder that transformers wrote: its tensors, the reason why a file cannot be read, and what an export copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from suite.errors import SettingError
from suite.paths import read_json

_AGAIN = "download or save it again"
FOLLOWING_TENSORS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Tensors of old files that follow from the configuration."""
_WEIGHTS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors")
_COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("merges.txt", "added_tokens.json", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""What belongs to a trained model besides its weights and its configuration."""
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    key: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Returns the values. Raises SettingError for a damaged file."""
        with _opened(self.file) as tensors:
            tensor: Tensor = tensors.get_tensor(self.key)
            return tensor


def weights_file(folder: Path) -> Path:
    """Returns the file with all weights, or else the index of several: the order of transformers."""
    known = [folder / name for name in ("model.safetensors", "model.safetensors.index.json")]
    for exists in (Path.is_file, os.path.lexists):  # a link to nowhere is the one that cannot be read
        if found := [file for file in known if exists(file)]:
            return found[0]
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
    raise SettingError(
        f"{folder} has no model.safetensors; save a model there with save_pretrained"
        + (f" (weights like those in {folder / others[0]} are not read)" if others else "")
    )


def tensors_in(weights: Path) -> list[StoredTensor]:
    files = [weights]
    if weights.suffix == ".json":
        names = read_content(weights).get("weight_map")
        parts = list(names.values()) if isinstance(names, dict) else []
        if not parts or not all(str(name).endswith(".safetensors") for name in parts):
            raise SettingError(f"{weights} has no weight_map from the names of tensors to .safetensors files; {_AGAIN}")
        files = [weights.parent / name for name in sorted(set(parts))]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118 - no dict
                tensors[key] = StoredTensor(file, key, tuple(opened.get_slice(key).get_shape()))
    return list(tensors.values())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises SettingError, with the file and the reason, if it is missing or damaged."""
    _check_content(file)
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise SettingError(f"{file} cannot be read as safetensors ({one_line(error)}); {_AGAIN}") from None


def read_content(file: Path) -> dict[str, Any]:
    _check_content(file)
    return read_json(file, _AGAIN) or {}


def _check_content(file: Path) -> None:
    """Raises SettingError for a file that is missing, empty, or a pointer of Git LFS."""
    try:
        with file.open("rb") as opened:
            start = opened.read(40)
    except (OSError, ValueError) as error:
        raise SettingError(f"{file} cannot be read ({one_line(error)}); {_AGAIN}") from None
    if not start:
        raise SettingError(f"{file} is empty; {_AGAIN}")
    if start.startswith(b"version https://git-lfs"):
        raise SettingError(f"{file} is a Git LFS pointer, not the file that it stands for; run git lfs pull there")


def one_line(error: Exception) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(text.split()) or type(error).__name__


def copy_files(own: Path, folder: Path) -> list[str]:
    """Copies what belongs to the trained model; returns the names of the files that do not."""
    blobs = own.parent.parent / "blobs"  # the cache of Hugging Face links to it
    others = []
    for path in sorted(own.iterdir()):
        if not (path.is_file() and (path.name in _COPIED or path.name.upper().startswith(_LICENCES))):
            others += [path.name] * (path.name not in ("config.json", "model.safetensors.index.json"))
            continue
        if path.resolve().parent not in (own, blobs):
            raise SettingError(
                f"{path} is a symbolic link to {path.resolve()}, outside of the model's folder, and the export "
                "would have a copy of that file; replace the link by the file, or remove it"
            )
        shutil.copyfile(path, folder / path.name)
    return others
