"""``make checkpoints RUN=...``: where a run's checkpoints are, and which of them are whole."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.experiment import Experiment
from experiments.registry import read_experiment
from launch.runs import RunFolder, find_run
from suite.errors import CheckpointError
from suite.training.checkpoint import Audit, Storage, audit, folders_of


def place_of(run: RunFolder, experiment: Experiment) -> str:
    """Returns the folder or URL of a run's checkpoints."""
    if experiment.train.checkpoints is None:
        return str(run.checkpoints)
    return f"{experiment.train.checkpoints.rstrip('/')}/{run.path.parent.name}/{run.path.name}"


def place_of_run(folder: Path) -> str:
    """Returns the folder or URL of the checkpoints of a run that has begun, or its own folder where it has not."""
    run = RunFolder(folder.resolve())
    if not run.experiment.exists():
        return str(run.checkpoints)
    return place_of(run, read_experiment(run.experiment.read_text()))


def check_unused(place: str) -> None:
    """Raises CheckpointError when there are checkpoints where a new run would write its own: it would remove them."""
    found = folders_of(Storage(place))
    if found:
        raise CheckpointError(
            f"a new run would write its checkpoints to {place}, which has {', '.join(found)} of another run; "
            "move these away, or set train.checkpoints to another place"
        )


def checkpoints(asked: str, console: Console) -> bool:
    """Prints a run's checkpoints, every file of them verified; returns whether one of them is whole.

    Raises SettingError for an unknown run, CheckpointError when they cannot be listed or are another version's.
    """
    run = find_run(asked)
    place = place_of_run(run.path)
    audits = list(audit(Storage(place)))
    console.print(_table(place, audits) if audits else f"no checkpoints in {place} yet")
    return any(not one.faults for one in audits)


def _table(place: str, audits: list[Audit]) -> Table:
    rows = Table(title=f"checkpoints in {place}", title_justify="left")
    for heading in ("step", "layers", "MiB", "minutes ago", "good", "state"):
        rows.add_column(heading, justify="left" if heading in ("good", "state") else "right", overflow="fold")
    for one in audits:
        known = one.manifest
        rows.add_row(
            str(one.step),
            str(len(known.files)) if known else "",
            f"{sum(file.bytes for file in known.files.values()) / 2**20:,.1f}" if known else "",
            f"{max(0.0, time.time() - known.written) / 60:,.0f}" if known else "",
            "yes" if one.good else "not yet",
            "\n".join(one.faults) or "whole",
        )
    return rows
