"""Schedules by the words of a setting."""

from suite.pipeline.planning.memory import InFlightPeaks
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS


def fill_drain(stages, micro_batches, remat):
    return ScheduleConfig("fill_drain", (MAX_LIVE_GRAPHS[remat],)).actions(stages, micro_batches)


def in_flight(micro_batches, remat):
    """Returns what fill-drain brings together."""
    return InFlightPeaks.of(fill_drain(1, micro_batches, remat), micro_batches)
