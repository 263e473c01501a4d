"""The task of a language model; ``find_transformer`` makes any Transformer-L by its name."""

from experiments.language_model.experiment import LanguageModelExperiment
from experiments.language_model.runs import transformer_13, transformer_103, transformer_1663

EXPERIMENT, RUNS = LanguageModelExperiment, (transformer_13, transformer_103, transformer_1663)
