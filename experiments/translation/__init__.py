"""The task of translation."""

from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import MULTILINGUAL_RUNS, romance_strings

EXPERIMENT, RUNS = TranslationExperiment, (*MULTILINGUAL_RUNS, romance_strings)
