"""Filling a stage and its optimizer from a checkpoint, or refusing it: no tensor is taken that is not theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from suite.errors import CheckpointError
from suite.pipeline.stage import Stage
from suite.training.checkpoint.reading import Checkpoint
from suite.training.optimizer import StageOptimizer, State


def load_values(checkpoint: Checkpoint, stage: Stage, indices: Sequence[int] | None = None) -> None:
    """Fills the parameters and buffers of a stage, or of those of its layers.

    Raises CheckpointError when they belong to another model.
    """
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        if indices is not None and index not in indices:
            continue
        stored = _part(checkpoint.layers[index], "value/")
        own = layer.state_dict()
        odd = _differences(stored, own)
        if odd:
            raise CheckpointError(
                f"layer {index} of {checkpoint} is not this model's: {', '.join(odd)}; "
                "resume with the settings of the run that wrote it"
            )
        layer.load_state_dict(stored)


def load_optimizer(checkpoint: Checkpoint, stage: Stage, optimizer: StageOptimizer) -> None:
    """Fills the optimizer state of a stage's parameters, whole or as this worker's shard.

    Raises CheckpointError when it is another optimizer's, or of parameters that are frozen or that there are not.
    """
    for index, layer in zip(stage.indices, stage.layers, strict=True):
        stored = _part(checkpoint.layers[index], "state/")
        for name in (name for name, parameter in layer.named_parameters() if parameter.requires_grad):
            mine = [key for key in stored if key.rpartition("/")[0] == name]
            state: State = {key.removeprefix(f"{name}/"): stored.pop(key) for key in mine}
            if state:
                optimizer.load_state((index, name), state)
        if stored:
            raise CheckpointError(
                f"layer {index} of {checkpoint} has optimizer state of what is no trainable parameter of it: "
                f"{', '.join(sorted(stored))}; resume with the settings of the run that wrote it"
            )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _differences(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Returns in what tensors differ, in a few words each: names, shapes, types."""
    odd = [f"{name} is extra" for name in sorted(stored.keys() - own.keys())]
    odd += [f"{name} is missing" for name in sorted(own.keys() - stored.keys())]
    for name in sorted(stored.keys() & own.keys()):
        there, here = stored[name], own[name]
        if there.shape != here.shape:
            odd.append(f"{name} is {tuple(there.shape)} there and {tuple(here.shape)} here")
        elif there.dtype != here.dtype:
            odd.append(f"{name} is {there.dtype} there and {here.dtype} here")
    return odd
