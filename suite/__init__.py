"""The engine of the GPipe suite. Its public names are here; docs/own-model.md shows how to use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from suite.train_spec import TrainSpec

if TYPE_CHECKING:  # the command line imports this package and must not wait for torch
    from pathlib import Path

    from torch import nn

__all__ = ["TrainSpec", "load"]


def load(run: str | Path, checkpoint: str | int | None = None) -> nn.Module:
    """Returns the trained model of a run, built-in or your own, in evaluation mode on the CPU, in fp32.

    It takes the inputs of the first layer and returns what the last one returns. ``model.layers`` are the layers, with
    skips and ties as in training. ``run`` is its folder, ``name/id`` or id. ``checkpoint`` is "best", "latest" or the
    number of a step; None takes the best where there is one, otherwise the latest.

    Raises SettingError for an unknown run, CheckpointError for a checkpoint that is not there or does not fit the
    layers. Warns if the file with the layers has changed since the run.
    """
    from launch.inference.model import load_model  # here: only this public name looks up to the floors above

    return load_model(run, checkpoint)
