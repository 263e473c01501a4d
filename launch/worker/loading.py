"""Fills a worker's new stage from a checkpoint, of the run that it resumes or of the run that it starts from, and takes
over the checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from experiments.base.experiment import Experiment
from launch.runs.checkpoints import check_published, checkpoint_location, checkpoint_location_of_run
from launch.worker.attempt import Attempt, draft_of
from suite.errors import CheckpointError
from suite.exchange import broadcast
from suite.log import Log
from suite.paths import hide_secrets, sync_folder
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.runtime.stage import Stage
from suite.training import checkpoint

LOAD_TIMEOUT_S = 1800.0
"""Seconds for all workers to read a checkpoint; each may be GROUP_TIMEOUT_S behind another."""


def load_weights(
    experiment: Experiment, attempt: Attempt, executor: Executor, groups: ProcessGroups, log: Log
) -> tuple[checkpoint.Checkpoint | None, dict[str, Any]]:
    """Fills a new stage with the weights of the checkpoint that the attempt resumes from, otherwise of the run
    ``train.init_from``, if set. Returns that checkpoint, None for training that starts anew, and the vocabulary of that
    run, if it has one."""
    stage, readers = executor.stage, checkpoint.Readers(executor.coord, groups.data_parallel)
    if attempt.resume:
        with executor.status.waiting_for("all workers to read the checkpoint", LOAD_TIMEOUT_S):
            loaded = _load_to_resume(attempt, experiment, stage, readers, log)
        if loaded is not None:
            checkpoint.load_values(loaded, stage)
            return loaded, {}
    return None, _load_initial(experiment, stage, readers, log)


def _load_to_resume(
    attempt: Attempt, experiment: Experiment, stage: Stage, readers: checkpoint.Readers, log: Log
) -> checkpoint.Checkpoint | None:
    """Returns the attempt's checkpoint, or the newest valid one that is not abandoned; None if none was published."""
    location, step = checkpoint_location(attempt.run, experiment), attempt.checkpoint_step

    def select(checkpoints: list[checkpoint.Checkpoint]) -> list[checkpoint.Checkpoint]:
        if step is not None:
            return checkpoint.in_order(checkpoints, step, hide_secrets(location))
        check_published(attempt.run, location)
        return checkpoint.current(checkpoints)

    return checkpoint.newest_valid(location, stage.indices, experiment.list_length, log, select, readers)


def _load_initial(experiment: Experiment, stage: Stage, readers: checkpoint.Readers, log: Log) -> dict[str, Any]:
    """Loads the weights of the run ``train.init_from``, if set, into a new stage; returns the vocabulary of its
    checkpoint, if it has one, to compare."""
    source, last = experiment.train.init_from, experiment.list_length - 1
    if source is None:
        return {}
    indices = [index for index in stage.indices if index != last or not experiment.new_last_layer]
    location = checkpoint_location_of_run(Path(source))
    select = partial(checkpoint.in_order, choice=None, place=source)
    loaded = checkpoint.newest_valid(location, indices, experiment.list_length, log, select, readers)
    if loaded is None:
        raise CheckpointError(f"{source} has no valid checkpoint; set train.init_from to a trained run")
    if last in indices and (differences := checkpoint.layer_differences(stage.by_index[last], loaded.layers[last])):
        if readers.coord.replica == 0:
            log(f"layer {last}, the last one, starts anew; it is not that of {source}: {', '.join(differences)}")
        indices.remove(last)
    checkpoint.load_values(loaded, stage, indices)
    return {name: value for name, value in loaded.notes.items() if name == "vocabulary"}


def begin_attempt(attempt: Attempt, experiment: Experiment, coord: RankCoord, start: int, log: Log) -> None:
    """Makes this attempt the owner of a resumed run's checkpoints, and replaces experiment and plan by their drafts.
    All workers must call it; it waits until all have read the drafts."""
    dist.barrier()
    if not attempt.resume:
        return
    run, step = attempt.run, attempt.checkpoint_step
    _take_over(attempt, experiment)  # before later steps go
    if coord.rank == 0:
        for file in (run.plan_json, run.experiment):  # the experiment last: its draft says that the run is starting
            if draft_of(file).exists():
                draft_of(file).replace(file)
        sync_folder(run.path)
        log(f"resumed at step {start}" if start else "no usable checkpoint: training starts anew")
    if step is not None and coord.is_metrics_rank:
        run.record.unlink(missing_ok=True)  # of later steps; a driver elsewhere removes its own copy


def _take_over(attempt: Attempt, experiment: Experiment) -> None:
    """Makes the attempt the owner of the checkpoints, and the one that it chose, if any, that which the run continues
    from. Raises CheckpointError, on all workers, when that cannot be written."""
    fault, step = "", attempt.checkpoint_step
    if dist.get_rank() == 0:
        try:
            storage = checkpoint.Storage(checkpoint_location(attempt.run, experiment))
            checkpoint.claim(storage, attempt.owner_of_attempt)
            if step is not None:
                checkpoint.abandon_later(storage, step)
        except (OSError, CheckpointError) as error:
            marks = f", and those after step {step} not marked as abandoned" if step is not None else ""
            fault = f"the checkpoints cannot be taken over{marks}: {error}"
    if fault := broadcast(fault):
        raise CheckpointError(fault)
