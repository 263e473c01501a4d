"""Checkpoints that any K, R and schedule can read: one file a layer, and a manifest that comes last.

    checkpoints/00000050/layer-0000.safetensors     value/<name>: parameters and buffers
                         layer-0001.safetensors     state/<parameter>/<name>: optimizer state, whole
                         manifest.json              step, digests of all layer files, and of itself

A folder without a manifest that agrees with its files is not a checkpoint: it is named, and the one before is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from suite.errors import CheckpointError
from suite.pipeline.stage import Stage
from suite.pipeline.topology import Place
from suite.training.optimizer import StageOptimizer, State

KEEP = 2
"""Checkpoints left in place: the newest, and one to fall back to."""


@dataclass(frozen=True)
class Checkpoint:
    """One written state of a whole run."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done when it was written: also the whole state of the sampler."""
        return int(self.manifest["step"])

    def verify(self, layers: Sequence[int]) -> list[str]:
        """Returns what is wrong with the files of some layers, a line each; empty when their digests agree."""
        faults = []
        for layer in layers:
            name = layer_file(layer)
            path = self.folder / name
            wanted = self.manifest["files"].get(name)
            if wanted is None:
                faults.append(f"{path}: not in the manifest")
            elif not path.exists():
                faults.append(f"{path}: missing")
            elif _digest(path) != wanted:
                faults.append(f"{path}: its SHA-256 is not the manifest's")
        return faults


def layer_file(layer: int) -> str:
    """Returns the file name of one layer."""
    return f"layer-{layer:04d}.safetensors"


def list_checkpoints(folder: Path, say: Callable[[str], None]) -> list[Checkpoint]:
    """Returns the checkpoints below ``folder`` whose manifest is whole, newest first; names the others."""
    found = []
    for path in sorted(folder.glob("[0-9]*"), reverse=True):
        try:
            text = (path / "manifest.json").read_text()
            manifest = json.loads(text)
            body = manifest.pop("self")
            if body != _text_digest(manifest):
                raise ValueError("its own digest does not agree")
            found.append(Checkpoint(path, manifest))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = (
                "no manifest, it was never finished"
                if isinstance(error, FileNotFoundError)
                else f"bad manifest: {error}"
            )
            say(f"checkpoint {path} is not used: {reason}")
    return found


def newest_valid(folder: Path, layers: Sequence[int], say: Callable[[str], None]) -> Checkpoint | None:
    """Returns the newest checkpoint all of whose files are whole. All workers must call it; all get the same one.

    Each worker verifies the ``layers`` it will read; ``say`` hears of what is damaged on the first rank.
    """
    speaking = dist.get_rank() == 0
    offered: list[Any] = [[(c.folder, c.manifest) for c in list_checkpoints(folder, say)] if speaking else None]
    dist.broadcast_object_list(offered, src=0)
    for path, manifest in offered[0]:
        checkpoint = Checkpoint(path, manifest)
        faults: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, checkpoint.verify(layers))
        if not any(faults):
            return checkpoint
        if speaking:
            for fault in sorted({line for lines in faults for line in lines}):
                say(f"checkpoint {path} is not used: {fault}")
    return None


def save(folder: Path, step: int, stage: Stage, optimizer: StageOptimizer, place: Place, notes: dict[str, Any]) -> None:
    """Writes the state after ``step`` steps. All workers must call it; the first replica writes.

    Each worker waits until the manifest is published, so a run never goes on without the checkpoint it counts on.
    """
    target = folder / f"{step:08d}"
    if place.replica == 0:
        target.mkdir(parents=True, exist_ok=True)
        (target / "manifest.json").unlink(missing_ok=True)
    dist.barrier()
    files: dict[str, str] = {}
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        tensors = {f"value/{name}": value for name, value in layer.state_dict().items()}
        for name, _ in layer.named_parameters():
            for part, value in optimizer.state((index, name)).items():
                tensors[f"state/{name}/{part}"] = value
        if place.replica == 0:
            path = target / layer_file(index)
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
            _sync(path)
            files[path.name] = _digest(path)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, files)
    if dist.get_rank() == 0:
        merged = {name: digest for share in shares for name, digest in share.items()}
        _publish(target, {"format": 1, "step": step, "files": dict(sorted(merged.items())), **notes})
        _rotate(folder, step)
    dist.barrier()


def load_values(checkpoint: Checkpoint, stage: Stage, indices: Sequence[int] | None = None) -> None:
    """Fills the parameters and buffers of a stage, or of those of its layers.

    Raises CheckpointError when they belong to another model.
    """
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        if indices is not None and index not in indices:
            continue
        stored = _parts(checkpoint, index, "value/")
        own = layer.state_dict()
        if {n: tuple(v.shape) for n, v in stored.items()} != {n: tuple(v.shape) for n, v in own.items()}:
            odd = sorted(set(stored) ^ set(own)) or [n for n in own if own[n].shape != stored[n].shape]
            raise CheckpointError(
                f"layer {index} of {checkpoint.folder} is not this model's: {', '.join(odd)} differ; "
                "resume with the settings of the run that wrote it"
            )
        layer.load_state_dict(stored)


def load_optimizer(checkpoint: Checkpoint, stage: Stage, optimizer: StageOptimizer) -> None:
    """Fills the optimizer state of a stage's parameters, whole or as this worker's shard."""
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        stored = _parts(checkpoint, index, "state/")
        for name, _ in layer.named_parameters():
            state: State = {key.removeprefix(f"{name}/"): v for key, v in stored.items() if key.startswith(f"{name}/")}
            if state:
                optimizer.load_state((index, name), state)


def _parts(checkpoint: Checkpoint, layer: int, prefix: str) -> dict[str, torch.Tensor]:
    stored = load_file(checkpoint.folder / layer_file(layer))
    return {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}


def _publish(target: Path, manifest: dict[str, Any]) -> None:
    path = target / "manifest.json"
    draft = target / "manifest.json.draft"
    draft.write_text(json.dumps({**manifest, "self": _text_digest(manifest)}, indent=1))
    _sync(draft)
    draft.rename(path)
    _sync(target)


def _rotate(folder: Path, step: int) -> None:
    """Leaves the newest KEEP finished checkpoints up to ``step``.

    What lies beyond ``step`` is of a future that a resume gave up, and what has no manifest was never finished.
    """
    finished = sorted(path.parent for path in folder.glob("[0-9]*/manifest.json") if int(path.parent.name) <= step)
    for path in folder.glob("[0-9]*"):
        if path not in finished[-KEEP:]:
            (path / "manifest.json").unlink(missing_ok=True)  # first: a half-deleted folder is no checkpoint
            shutil.rmtree(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
