"""``make sweep NAME=...``: a family of runs, one after the other; what is finished already is not run again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from experiments.scales import onto
from experiments.transfer import NAME as TRANSFER
from experiments.transfer import SweepRun, transfer_runs, transfer_table
from launch.checkpoints import place_of_run
from launch.devices import this_machine
from launch.runs import RUNS, held, named_run
from launch.session import resume, run_experiment
from suite.errors import SettingError, nearest
from suite.training.checkpoint import list_checkpoints


def sweep(name: str, launcher: str, console: Console) -> None:
    """Runs what is left of a sweep. Raises SettingError for an unknown name, and whatever ends a run."""
    sweeps: dict[str, Callable[[Path], Iterator[SweepRun]]] = {TRANSFER: transfer_runs}
    if name not in sweeps:
        raise SettingError(f"no sweep is called {name!r}; {nearest(name, sweeps)}")
    runs = list(sweeps[name]((RUNS / name).resolve()))
    for at, one in enumerate(runs):
        folder = RUNS / name / one.id
        if (folder / "record.json").exists():
            console.print(f"{at + 1} of {len(runs)}, {one.id}: finished already")
            continue
        console.print(f"{at + 1} of {len(runs)}, {one.id}")
        if list_checkpoints(place_of_run(folder), console.print):
            console.print("it was left unfinished and is taken up again")
            resume(str(folder), "", launcher, console)
            continue
        if folder.exists():
            console.print("it was left before its first checkpoint and is begun again")
            with held(folder):
                shutil.rmtree(folder)
        run_experiment(onto(one.experiment, this_machine()), named_run(name, one.id), launcher, console)
    table = transfer_table(RUNS)
    console.print(table.shown() if console.is_terminal else table.markdown())
