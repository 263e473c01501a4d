"""Loads a stage and its optimizer from a checkpoint, and rejects tensors that do not match them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from suite.errors import CheckpointError
from suite.pipeline.runtime.stage import Stage
from suite.training.checkpoint.reading import Checkpoint
from suite.training.optimizer import StageOptimizer, State


def load_values(checkpoint: Checkpoint, stage: Stage, indices: Sequence[int] | None = None) -> None:
    """Loads the parameters and buffers of a stage, or only of its layers in ``indices``.

    Raises CheckpointError when they belong to another model.
    """
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        if indices is not None and index not in indices:
            continue
        stored = _part(checkpoint.layers[index], "value/")
        own = layer.state_dict()
        differences = _differences(stored, own)
        if differences:
            raise CheckpointError(
                f"layer {index} of {checkpoint} does not match this model: {', '.join(differences)}; "
                "resume with the settings of the run that wrote it"
            )
        layer.load_state_dict(stored)


def load_optimizer(checkpoint: Checkpoint, stage: Stage, optimizer: StageOptimizer) -> None:
    """Loads the optimizer state of a stage's parameters; with ZeRO, this worker's shard of it.

    Raises CheckpointError for the state of another optimizer, and for the state of frozen or unknown parameters.
    """
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        stored = _part(checkpoint.layers[index], "state/")
        for name in (name for name, parameter in layer.named_parameters() if parameter.requires_grad):
            keys = [key for key in stored if key.rpartition("/")[0] == name]
            state: State = {key.removeprefix(f"{name}/"): stored.pop(key) for key in keys}
            if state:
                optimizer.load_state((index, name), state)
        if stored:
            raise CheckpointError(
                f"layer {index} of {checkpoint} has optimizer state for parameters that this model does not train: "
                f"{', '.join(sorted(stored))}; resume with the settings of the run that wrote it"
            )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _differences(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Describes each difference in names, shapes and types in a few words."""
    differences = [f"{name} is extra" for name in sorted(stored.keys() - own.keys())]
    differences += [f"{name} is missing" for name in sorted(own.keys() - stored.keys())]
    for name in sorted(stored.keys() & own.keys()):
        saved, current = stored[name], own[name]
        if saved.shape != current.shape:
            differences.append(f"{name} is {tuple(saved.shape)}, the model has {tuple(current.shape)}")
        elif saved.dtype != current.dtype:
            differences.append(f"{name} is {saved.dtype}, the model has {current.dtype}")
    return differences
