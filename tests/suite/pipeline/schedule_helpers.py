"""Schedules, memory and validation in the short form that tests use."""

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS
from suite.pipeline.schedule.validate import texts_by_unit
from suite.pipeline.schedule.validate import validate as validated_rows


def parse(lines):
    """Returns a schedule from a text for each stage."""
    return [[Action.parse(cell) for cell in line.split()] for line in lines]


def fill_drain(stages, micro_batches, remat):
    return ScheduleConfig("fill_drain", (MAX_LIVE_GRAPHS[remat],)).actions(stages, micro_batches)


def cell_bytes(model, begin, end):
    """Returns the bytes of the cell of layers ``begin`` to ``end``, exclusive, in a partition of up to 3 cells."""
    cells = [cell for cell in (range(begin), range(begin, end), range(end, len(model.costs))) if cell]
    return model.in_partition(cells, CellPlacement(len(cells)))[1 if begin else 0]


def validate(schedule, micro_batches, train=True, cell_to_stage=()):
    """Validates a schedule; returns a text for each stage and unit of time."""
    return texts_by_unit(validated_rows(schedule, micro_batches, train, cell_to_stage=cell_to_stage))
