"""The model of a trained run in one process: ``suite.load``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from launch.runs.checkpoints import checkpoints_to_use
from launch.runs.store import RunFolder, find_run, resume_command
from suite.errors import CheckpointError
from suite.log import Log
from suite.pipeline.model.layers import Tensors, materialize, ties_of
from suite.pipeline.runtime.skip import Stash, call
from suite.training.checkpoint import Checkpoint, Choice, load_layer, parse_choice

T = TypeVar("T")


class WholeModel(nn.Module):
    """All layers of a model, one after another. Skips go past the layers between, as they do in a pipeline."""

    def __init__(self, layers: list[nn.Module]) -> None:
        """Copies of a tied parameter become one: the first layer's."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        first_copies: dict[str, nn.Parameter] = {}
        for layer in layers:
            for name, tie in ties_of(layer).items():
                module, _, attribute = name.rpartition(".")
                first = first_copies.setdefault(tie, layer.get_parameter(name))
                setattr(layer.get_submodule(module), attribute, first)

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        """Returns what the last layer returns for the inputs of the first one: one tensor or a tuple."""
        stash: Stash = {}
        tensors: Tensors = inputs
        for layer in self.layers:
            tensors = call(layer, tensors, stash)
        return tensors[0] if len(tensors) == 1 else tensors


def load_model(run: str | Path, checkpoint: str | int | None = None) -> WholeModel:
    """Returns the trained model of a run; ``suite.load`` describes it."""
    choice = parse_choice("" if checkpoint is None else str(checkpoint))
    folder = find_run(str(run))
    experiment = read_experiment_file(folder.experiment)
    layers, _ = experiment.build()
    cpu = torch.device("cpu")

    def read(found: Checkpoint) -> WholeModel:
        made = [materialize(layer, experiment.train.seed, cpu) for layer in layers]
        for index, layer in enumerate(made):
            load_layer(found, index, layer, found.read(index))
        if changed := experiment.layers_changed(found.notes):
            warnings.warn(changed, stacklevel=4)
        return WholeModel(made)

    _, model = from_first_valid(folder, experiment, choice, warnings.warn, read)
    return model.eval()


def from_first_valid(
    run: RunFolder, experiment: Experiment, choice: Choice, log: Log, read: Callable[[Checkpoint], T]
) -> tuple[int, T]:
    """Returns the step of the first chosen checkpoint that ``read`` can read, and what it returns.

    Raises CheckpointError when there is none.
    """
    reason = ""
    for checkpoint in checkpoints_to_use(run, experiment, choice, log):
        checkpoint.check_layers(experiment.list_length)
        try:
            return checkpoint.step, read(checkpoint)
        except CheckpointError as error:
            reason = str(error)
            log(f"checkpoint {checkpoint} is not used: {error}")
    raise CheckpointError(f"run {run.path} has no valid checkpoint: {reason}; {resume_command(run)} writes one")
