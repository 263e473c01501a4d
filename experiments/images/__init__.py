"""The task of classifying images."""

from experiments.images.experiment import ImageExperiment
from experiments.images.runs import amoebanet_fashion, amoebanet_imagenet

EXPERIMENT, RUNS = ImageExperiment, (amoebanet_fashion, amoebanet_imagenet)
