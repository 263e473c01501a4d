"""The parts of a run that depend on its task, such as text or images: its workload and its data."""

from __future__ import annotations

from pathlib import Path

from experiments.base.experiment import Experiment
from experiments.base.workload import Workload
from experiments.custom.experiment import CustomExperiment
from experiments.custom.workload import Custom
from experiments.images.experiment import ImageExperiment
from experiments.images.workload import Classification
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.language_model.workload import LanguageModel
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.workload import Translation
from suite.data.documents.prepare import check_documents, folder_of_documents, prepare_documents
from suite.data.images.prepare import folder_of_images, prepare_images
from suite.data.images.sets import check_source
from suite.data.text.corpora import check_corpus
from suite.data.text.prepare import folder_of, prepare
from suite.log import Log


def workload(experiment: Experiment, data: Path | None = None) -> Workload:
    """Returns the workload of an experiment. With the folder of its prepared data, samples are real data."""
    if isinstance(experiment, TranslationExperiment):
        return Translation(experiment, data)
    if isinstance(experiment, LanguageModelExperiment):
        return LanguageModel(experiment)
    if isinstance(experiment, CustomExperiment):
        return Custom(experiment)
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return Classification(experiment)


def check_data(experiment: Experiment) -> None:
    """Raises DataError for a text or image set that is no known name and no folder. Fetches nothing."""
    if isinstance(experiment, TranslationExperiment):
        check_corpus(experiment.data)
    elif isinstance(experiment, LanguageModelExperiment):
        check_documents(experiment.data)
    elif isinstance(experiment, ImageExperiment):
        check_source(experiment.data)


def data_folder(experiment: Experiment, cache: Path) -> Path:
    """Returns the cache folder of the experiment's data."""
    if isinstance(experiment, TranslationExperiment):
        return folder_of(experiment.text, cache)
    if isinstance(experiment, LanguageModelExperiment):
        return folder_of_documents(experiment.text, cache)
    if isinstance(experiment, CustomExperiment):
        return cache  # the function reads its data from where it likes
    assert isinstance(experiment, ImageExperiment), type(experiment)
    return folder_of_images(experiment.images, cache)


def prepare_data(experiment: Experiment, cache: Path, log: Log) -> str:
    """Prepares the data and returns its name. The name differs from the setting if a fallback was used.

    Raises DataError when the data is not available.
    """
    if isinstance(experiment, TranslationExperiment):
        return prepare(experiment.text, cache, log).corpus
    if isinstance(experiment, LanguageModelExperiment):
        return prepare_documents(experiment.text, cache, log).corpus
    if isinstance(experiment, CustomExperiment):
        return experiment.data
    assert isinstance(experiment, ImageExperiment), type(experiment)
    model = experiment.model
    return prepare_images(experiment.images, model.channels, model.classes, cache, log).info.source
