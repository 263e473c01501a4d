"""Loads a stage and its optimizer from a checkpoint, or a layer alone. Tensors that do not match are rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import Tensor, nn

from suite.errors import CheckpointError
from suite.pipeline.runtime.stage import Stage
from suite.training.checkpoint.reading import REMEDY, Checkpoint
from suite.training.optimizer import State
from suite.training.stage_optimizer import StageOptimizer


def load_values(checkpoint: Checkpoint, stage: Stage, indices: Sequence[int] | None = None) -> None:
    """Loads the parameters and buffers of a stage, or only of its layers in ``indices``.

    Raises CheckpointError when they belong to another model.
    """
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        if indices is None or index in indices:
            load_layer(checkpoint, index, layer, checkpoint.layers[index])


def load_layer(checkpoint: Checkpoint, index: int, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Loads the parameters and buffers of one layer from what the checkpoint has of it.

    Raises CheckpointError when they belong to another model.
    """
    _check_layer(checkpoint, index, layer, tensors)
    layer.load_state_dict(values_of(tensors))


def check_model(checkpoint: Checkpoint, layers: Sequence[nn.Module], but_last: bool = False) -> None:
    """Raises CheckpointError when a checkpoint is of another model than these layers, or these ``but_last``. It reads
    headers alone: a damaged file is found when it is loaded, and then an earlier checkpoint may be."""
    checkpoint.check_layers(len(layers))
    for index, layer in enumerate(layers[: len(layers) - but_last]):
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            _check_layer(checkpoint, index, layer, checkpoint.read_header(index))


def _check_layer(checkpoint: Checkpoint, index: int, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    if differences := layer_differences(layer, tensors):
        raise CheckpointError(
            f"layer {index} of {checkpoint} does not match this model: {', '.join(differences)}; {REMEDY}"
        )


def layer_differences(layer: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns each difference between a layer and what a checkpoint has of it, in names, shapes and types."""
    stored, own = values_of(tensors), layer.state_dict()
    differences = [f"{name} is extra" for name in sorted(stored.keys() - own.keys())]
    differences += [f"{name} is missing" for name in sorted(own.keys() - stored.keys())]
    for name in sorted(stored.keys() & own.keys()):
        saved, current = stored[name], own[name]
        if saved.shape != current.shape:
            differences.append(f"{name} is {tuple(saved.shape)}, the model has {tuple(current.shape)}")
        elif saved.dtype != current.dtype:
            differences.append(f"{name} is {saved.dtype}, the model has {current.dtype}")
    return differences


def values_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a layer's parameters and buffers among its stored tensors, by name."""
    return _part(tensors, "value/")


def load_optimizer(checkpoint: Checkpoint, optimizer: StageOptimizer) -> None:
    """Loads the optimizer state of its stage's parameters; with ZeRO, this worker's shard of it. Frees what was read of
    the layers: a run keeps the checkpoint that it began from.

    Raises CheckpointError for the state of another optimizer, and for the state of frozen or unknown parameters.
    """
    for index, layer in zip(optimizer.stage.indices, optimizer.stage.layers, strict=True):
        stored = _part(checkpoint.layers.pop(index), "state/")
        for name in (name for name, parameter in layer.named_parameters() if parameter.requires_grad):
            keys = [key for key in stored if key.rpartition("/")[0] == name]
            state: State = {key.removeprefix(f"{name}/"): stored.pop(key) for key in keys}
            if state:
                optimizer.load_state((index, name), state)
        if stored:
            raise CheckpointError(
                f"layer {index} of {checkpoint} has optimizer state for parameters that this model does not train: "
                f"{', '.join(sorted(stored))}; {REMEDY}"
            )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
