"""What depends on whether a run is on text or on images: its workload, and its data by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.experiment import Experiment
from experiments.image_experiment import ImageExperiment
from experiments.image_workload import Classification
from experiments.text_experiment import TranslationExperiment
from experiments.text_workload import Translation
from experiments.workload import Workload
from suite.data.image_prepare import folder_of_images, prepare_images
from suite.data.prepare import folder_of, prepare

Say = Callable[[str], None]


def workload(experiment: Experiment, data: Path | None = None) -> Workload:
    """Returns an experiment as the plan sees it; with the folder of its prepared data, from what it will see."""
    if isinstance(experiment, TranslationExperiment):
        return Translation(experiment, data)
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return Classification(experiment)


def data_folder(experiment: Experiment, cache: Path) -> Path:
    """Returns where the experiment's prepared data is kept."""
    if isinstance(experiment, TranslationExperiment):
        return folder_of(experiment.text, cache)
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return folder_of_images(experiment.images, cache)


def prepare_data(experiment: Experiment, cache: Path, say: Say) -> str:
    """Prepares the data and returns the name of what was prepared: another one where this one cannot be had.

    Raises DataError when nothing can.
    """
    if isinstance(experiment, TranslationExperiment):
        return prepare(experiment.text, cache, say).corpus
    assert isinstance(experiment, ImageExperiment), type(experiment)
    model = experiment.model
    return prepare_images(experiment.images, model.channels, model.classes, cache, say).facts.source
