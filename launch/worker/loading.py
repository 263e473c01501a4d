"""Fills a worker's new stage from a checkpoint: of the run that it resumes, or of the run that it starts from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from experiments.base.experiment import Experiment
from launch.runs.checkpoints import check_published, checkpoint_location, checkpoint_location_of_run
from launch.runs.store import RunFolder
from suite.errors import CheckpointError
from suite.exchange import broadcast
from suite.log import Log
from suite.paths import hide_secrets
from suite.pipeline.runtime.stage import Stage
from suite.training import checkpoint


def load_to_resume(
    run: RunFolder, experiment: Experiment, stage: Stage, log: Log, step: int | None
) -> checkpoint.Checkpoint | None:
    """Returns the checkpoint of ``step``, or the newest valid one that is not abandoned; None if none was published."""
    location = checkpoint_location(run, experiment)

    def select(checkpoints: list[checkpoint.Checkpoint]) -> list[checkpoint.Checkpoint]:
        if step is not None:
            return checkpoint.in_order(checkpoints, step, hide_secrets(location))
        check_published(run, location)
        return checkpoint.current(checkpoints)

    return checkpoint.newest_valid(location, stage.indices, experiment.list_length, log, select)


def take_over(run: RunFolder, experiment: Experiment, owner: str, step: int | None) -> None:
    """Makes ``owner`` the owner of the checkpoints, and that of the chosen ``step``, if any, the one that the run
    continues from. All workers must call it. Raises CheckpointError, on all workers, when that cannot be written."""
    fault = ""
    if dist.get_rank() == 0:
        try:
            storage = checkpoint.Storage(checkpoint_location(run, experiment))
            checkpoint.claim(storage, owner)
            if step is not None:
                checkpoint.abandon_later(storage, step)
        except (OSError, CheckpointError) as error:
            marks = f", and those after step {step} not marked as abandoned" if step is not None else ""
            fault = f"the checkpoints cannot be taken over{marks}: {error}"
    if fault := broadcast(fault):
        raise CheckpointError(fault)


def initialize(experiment: Experiment, stage: Stage, log: Log) -> dict[str, Any]:
    """Loads the weights of the run ``train.init_from``, if set, into a new stage; returns the vocabulary of its
    checkpoint, if it has one, to compare."""
    source, last = experiment.train.init_from, experiment.list_length - 1
    if source is None:
        return {}
    indices = [index for index in stage.indices if index != last or not experiment.new_last_layer]
    location = checkpoint_location_of_run(Path(source))
    select = partial(checkpoint.in_order, choice=None, place=source)
    loaded = checkpoint.newest_valid(location, indices, experiment.list_length, log, select)
    if loaded is None:
        raise CheckpointError(f"{source} has no valid checkpoint; set train.init_from to a trained run")
    if last in indices and (differences := checkpoint.layer_differences(stage.layer(last), loaded.layers[last])):
        log(f"layer {last}, the last one, starts anew, because it is not that of {source}: {', '.join(differences)}")
        indices.remove(last)
    checkpoint.load_values(loaded, stage, indices)
    return {name: value for name, value in loaded.notes.items() if name == "vocabulary"}
