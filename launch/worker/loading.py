"""Fills a worker's new stage from a checkpoint: of the run that it resumes, or of the run that it starts from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from experiments.base.experiment import Experiment
from launch.runs.checkpoints import check_published, checkpoint_location, checkpoint_location_of_run
from launch.runs.store import RunFolder
from suite.errors import CheckpointError
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


def continue_from(run: RunFolder, experiment: Experiment, step: int) -> None:
    """Makes the checkpoint of ``step`` the one that the run continues from. Raises CheckpointError when that cannot be
    written."""
    location = checkpoint_location(run, experiment)
    try:
        checkpoint.abandon_later(checkpoint.Storage(location), step)
    except OSError as error:
        raise CheckpointError(f"the checkpoints after step {step} cannot be marked as abandoned: {error}") from None


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
