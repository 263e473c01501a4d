"""What the file of a run keeps of its experiment."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file


def stored(experiment: Experiment) -> Experiment:
    """Writes an experiment and returns it as it is read again."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.toml"
        file.write_text(experiment.to_toml())
        return read_experiment_file(file)
