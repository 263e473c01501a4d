"""Schedules by the words of a setting."""

from suite.pipeline.memory import Crowd
from suite.pipeline.rebuild import GRAPHS
from suite.pipeline.recipe import Recipe


def fill_drain(stages, micro_batches, remat):
    return Recipe("fill_drain", (GRAPHS[remat],)).actions(stages, micro_batches)


def crowd(micro_batches, remat):
    """Returns what fill-drain brings together."""
    return Crowd.of(fill_drain(1, micro_batches, remat), micro_batches)
