"""The task of a user's own layers, loss and data. It has no named runs."""

from experiments.custom.experiment import CustomExperiment

EXPERIMENT, RUNS = CustomExperiment, ()
