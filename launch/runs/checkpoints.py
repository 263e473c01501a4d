"""``make checkpoints RUN=...``: where a run's checkpoints are, and which of them are valid."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.registry import read_experiment_file
from launch.runs.store import RunFolder, find_run, resume_command
from suite.errors import CheckpointError, RunFileError
from suite.log import Log
from suite.paths import hide_secrets, read_json, write_atomically
from suite.training.checkpoint import Checkpoint, Choice, best_of, current, folders_of, in_order, list_checkpoints
from suite.training.checkpoint.reading import Audit, audit
from suite.training.checkpoint.retention import ABANDONED
from suite.training.checkpoint.storage import MANIFEST, Storage
from suite.training.validation import state_of


def checkpoint_location(run: RunFolder, experiment: Experiment) -> str:
    """Returns the folder or URL of a run's checkpoints."""
    if experiment.train.checkpoint_dir is None:
        return str(run.checkpoints)
    return f"{experiment.train.checkpoint_dir.rstrip('/')}/{run.path.parent.name}/{run.path.name}"


def checkpoint_location_of_run(folder: Path) -> str:
    """Returns the folder or URL of a run's checkpoints; the default folder if the run has not started."""
    run = RunFolder(folder.resolve())
    if not run.experiment.exists():
        return str(run.checkpoints)
    return checkpoint_location(run, read_experiment_file(run.experiment))


def steps_in_folder(run: RunFolder) -> list[int]:
    """Returns the steps of the finished, not abandoned checkpoints in the run's own folder, in order. Reads no file."""
    folders = (path.parent for path in run.checkpoints.glob(f"*/{MANIFEST}") if path.parent.name.isdecimal())
    return sorted(int(folder.name) for folder in folders if not (folder / ABANDONED).exists())


def note_published(run: RunFolder, step: int) -> None:
    """Records in the run's folder that the checkpoint of ``step`` is published. Raises OSError."""
    write_atomically(run.published, json.dumps({"step": step}))


def read_published(run: RunFolder) -> int | None:
    """Returns the step of the last published checkpoint; None if there was none, or by an older version. Raises
    RunFileError for a damaged record: it is never taken as "none yet"."""
    advice = (
        'write {"step": N} into it with the step N of the newest checkpoint, or choose one with '
        f"{option('CHECKPOINT')}, and run the command again"
    )
    published = read_json(run.published, advice)
    if published is not None and type(published.get("step")) is not int:
        raise RunFileError(f"{run.published} is damaged: it has no number of a step; {advice}")
    return None if published is None else published["step"]


def check_published(run: RunFolder, location: str) -> None:
    """Raises CheckpointError when the last published checkpoint is not at ``location``: that is no run without
    checkpoints, but one whose folder was moved or whose disk is missing."""
    try:
        step = read_published(run)
    except RunFileError as error:  # all workers expect this one
        raise CheckpointError(str(error)) from None
    if step is None:
        return
    found = folders_of(Storage(location))
    if not any(int(folder) >= step for folder in found):  # a copy of the run's folder may know an earlier one
        others = f"only {', '.join(found)}" if found else "no checkpoint"
        raise CheckpointError(
            f"run {run.path} has published a checkpoint of step {step}, and {hide_secrets(location)} has {others}; "
            "mount that disk or restore that folder"
            + (f"; or choose another one with {option('CHECKPOINT')}" if found else "")
        )


def checkpoints_to_use(run: RunFolder, experiment: Experiment, choice: Choice, log: Log) -> list[Checkpoint]:
    """Returns the checkpoints that a command tries, in order.

    Raises CheckpointError for a run without a checkpoint, and when the chosen one is not there.
    """
    location = checkpoint_location(run, experiment)
    checkpoints = list_checkpoints(location, log)
    if not checkpoints:
        check_published(run, location)
        how = "short trainings save none" if run.record.exists() else f"get its first one with {resume_command(run)}"
        raise CheckpointError(f"run {run.path} has no valid checkpoint; {how}")
    if not (found := in_order(checkpoints, choice, f"run {run.path}")):
        left = f"a checkpoint that is gone or damaged, and abandoned that of step {checkpoints[0].step}"
        raise CheckpointError(f"run {run.path} went back to {left}; choose this with {option('CHECKPOINT')}")
    return found


def kind_of_checkpoint(run: RunFolder, experiment: Experiment, step: int) -> str:
    """Returns which of a run's checkpoints that of ``step`` is: ``best``, ``latest``, or ``other``."""
    checkpoints = current(list_checkpoints(checkpoint_location(run, experiment), lambda text: None))
    best = best_of(checkpoints)
    if best is not None and best.step == step:
        return "best"
    return "latest" if checkpoints and checkpoints[0].step == step else "other"


def described_checkpoint(step: int, kind: str) -> str:
    """Returns what a command prints about the checkpoint that it used."""
    return f"checkpoint of step {step}" + ("" if kind == "other" else f", the {kind} one")


def check_unused(location: str) -> None:
    """Raises CheckpointError when a new run's location already has checkpoints: the run would remove them."""
    if existing := folders_of(Storage(location)):
        raise CheckpointError(
            f"a new run would write its checkpoints to {location}, which has {', '.join(existing)} of another run; "
            "move these away, or set train.checkpoint_dir to another location"
        )


def print_checkpoints(name: str, console: Console) -> bool:
    """Verifies and prints a run's checkpoints; returns whether at least one is valid.

    Raises SettingError for an unknown run, CheckpointError when they cannot be listed or have another format version.
    """
    run = find_run(name)
    location = checkpoint_location_of_run(run.path)
    audits = list(audit(Storage(location)))
    shown = hide_secrets(location)
    if audits:
        console.print(_table(shown, audits, read_experiment_file(run.experiment).criterion.name))
    else:
        console.print(f"no checkpoints in {shown} yet")
    return any(not checkpoint.faults for checkpoint in audits)


def _table(location: str, audits: list[Audit], criterion: str) -> Table:
    rows = Table(title=f"checkpoints in {location}", title_justify="left")
    for heading in ("step", "layers", "MiB", "minutes ago", "good", "best", "state"):
        rows.add_column(heading, justify="left" if heading in ("good", "best", "state") else "right", overflow="fold")
    best = best_of([each.checkpoint for each in audits if each.checkpoint])
    for each in audits:
        checkpoint = each.checkpoint
        manifest = checkpoint.manifest if checkpoint else None
        rows.add_row(
            str(each.step),
            str(len(manifest.files)) if manifest else "",
            f"{sum(file.bytes for file in manifest.files.values()) / 2**20:,.1f}" if manifest else "",
            f"{max(0.0, time.time() - manifest.written) / 60:,.0f}" if manifest else "",
            "yes" if checkpoint and checkpoint.good else "not yet",
            f"{criterion} {state_of(best.notes).best:.4f}" if best and checkpoint is best else "",
            "\n".join(each.faults) or ("abandoned" if checkpoint and checkpoint.abandoned else "valid"),
        )
    return rows
