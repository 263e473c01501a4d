"""Fills a worker's new stage from a checkpoint: of the run that it resumes, or of the run that it starts from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed as dist

from experiments.base.experiment import Experiment
from launch.runs.checkpoints import checkpoint_location_of_run
from suite.errors import CheckpointError
from suite.log import Log
from suite.paths import hide_secrets
from suite.pipeline.runtime.stage import Stage
from suite.training import checkpoint


def load_to_resume(location: str, stage: Stage, count: int, log: Log, step: int | None) -> checkpoint.Checkpoint | None:
    """Returns the newest valid checkpoint, or that of ``step`` after removing the later ones: a restart must not use
    them."""
    if step is None:
        return checkpoint.newest_valid(location, stage.indices, count, log)
    select = partial(checkpoint.in_order, choice=step, place=hide_secrets(location))
    loaded = checkpoint.newest_valid(location, stage.indices, count, log, select)
    if dist.get_rank() == 0:
        try:
            checkpoint.remove_later(checkpoint.Storage(location), step)
        except OSError as error:
            raise CheckpointError(f"the checkpoints after step {step} cannot be removed: {error}") from None
    dist.barrier()
    return loaded


def initialize(experiment: Experiment, stage: Stage, log: Log) -> None:
    """Loads the weights of the run ``train.init_from``, if set, into a new stage, except for the last layer."""
    source = getattr(experiment.train, "init_from", None)
    if source is None:
        return
    indices = [index for index in stage.indices if index < experiment.list_length - 1]
    location = checkpoint_location_of_run(Path(source))
    select = partial(checkpoint.in_order, choice=None, place=source)
    loaded = checkpoint.newest_valid(location, indices, experiment.list_length, log, select)
    if loaded is None:
        raise CheckpointError(f"{source} has no valid checkpoint; set train.init_from to a trained run")
    checkpoint.load_values(loaded, stage, indices)
