"""The task of a language model."""

from experiments.language_model.experiment import LanguageModelExperiment
from experiments.language_model.runs import LANGUAGE_MODEL_RUNS

EXPERIMENT, RUNS = LanguageModelExperiment, LANGUAGE_MODEL_RUNS
