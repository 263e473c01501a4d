"""The first steps of an experiment, trained to be compared: in a pipeline, or by plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.registry import resolve
from experiments.scaling.scale_choice import RequestedScale
from launch.backends.select import select_backend
from launch.diff.plain_training import train_plainly
from launch.runs.store import RunFolder, new_run
from launch.train.command import prepare, run_experiment
from launch.worker.precision import with_available_precision

FIXED = "train.validate_every=none tracking.wandb=disabled train.threads=1"
"""Settings of all runs. Products of matrices have other bits with another number of threads."""


@dataclass(frozen=True)
class ShortTraining:
    """A few steps of an experiment, whatever the pipeline."""

    name: str
    scale: RequestedScale
    launcher: str
    steps: int
    settings: str
    """Of all runs; those of a pipeline come on top."""

    def resolved(self, pipeline: str = "") -> tuple[Experiment, str]:
        """Returns the experiment, and what was shrunk. Raises SettingError for a wrong setting."""
        settings = f"{FIXED} {self.settings} {pipeline} train.steps={self.steps} train.fingerprint_steps={self.steps}"
        return resolve(self.name, self.scale, select_backend(self.launcher).cluster(), settings)

    def train(self, chosen: Experiment) -> RunFolder:
        """Trains it in its pipeline. Raises a SuiteError for any error that the user can fix."""
        return run_experiment(chosen, partial(new_run, chosen.name), self.launcher, Console(quiet=True))

    def prepared(self, chosen: Experiment, console: Console) -> Experiment:
        """Returns it with its data. Raises DataError when none is available."""
        cluster = select_backend(self.launcher).cluster()
        return prepare(with_available_precision(chosen, cluster, console.print), console)

    def train_plainly(self, chosen: Experiment) -> RunFolder:
        """Trains by plain PyTorch what its pipeline would train. Raises as ``train`` does."""
        prepared = self.prepared(chosen, Console(quiet=True))
        run = new_run(prepared.name)
        train_plainly(prepared, run)
        return run
