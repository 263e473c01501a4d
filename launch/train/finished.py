"""Whether a run is finished, and how to continue it."""

from __future__ import annotations

from typing import Any

from experiments.base.experiment import Experiment
from launch.runs.checkpoints import steps_in_folder
from launch.runs.store import SHORT_RUNS, RunFolder, resume_command
from suite.paths import read_json


def finished_record(run: RunFolder, chosen: Experiment) -> dict[str, Any] | None:
    """Returns the record of a run that has nothing left to train, None for any other run. Raises RunFileError for a
    damaged record."""
    record = read_json(run.record)
    return record if record and chosen.is_finished(record) else None


def how_to_go_on(run: RunFolder, chosen: Experiment, record: dict[str, Any]) -> str:
    """Returns why a run that has done the steps of ``record`` is not resumed, and the command that trains on."""
    done, steps = record["steps"], chosen.train.steps
    if done >= steps:
        so_far = f"finished all {steps} steps" if done == steps else f"done {done} steps, and train.steps is {steps}"
        return f"run {run.path} has {so_far}; to train longer: {resume_command(run, f'train.steps={2 * done}')}"
    return (
        f"run {run.path} is finished: {record['stopped_early']}; to train on: "
        f"{resume_command(run, 'train.patience=none')}, or a larger patience than {chosen.train.patience}"
    )


def after_interrupt(run: RunFolder, chosen: Experiment) -> str:
    """Returns how to continue a run that was interrupted."""
    if run.path.is_relative_to(SHORT_RUNS.resolve()) or not run.experiment.exists():
        return "nothing was saved; run the same command again to restart"
    if finished_record(run, chosen) is not None:
        return f"the run is finished: {run.path}"
    if chosen.train.checkpoint_dir is not None:
        return f"{resume_command(run)} continues from its latest checkpoint, or anew if it has none yet"
    steps = steps_in_folder(run)
    start = f"the checkpoint of step {steps[-1]}" if steps else "its beginning, because it has no checkpoint yet"
    return f"{resume_command(run)} continues from {start}"
