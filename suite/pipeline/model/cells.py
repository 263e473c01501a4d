"""Which stage owns which cell. All else asks here.

cell       0   1   2   3   4   5       K = 3, two cells a stage: round by round
stage      0   1   2   0   1   2
its cell   0   0   0   1   1   1       the virtual stage, ``F0.1`` of an action
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def stage_of(cell: int, stages: int) -> int:
    """Returns the stage that owns a cell; ``stages`` is K."""
    return cell % stages


def virtual_stage_of(cell: int, stages: int) -> int:
    """Returns a cell's number on its stage."""
    return cell // stages


def cell_of(virtual_stage: int, stage: int, stages: int) -> int:
    """Returns a stage's cell by its number there."""
    return virtual_stage * stages + stage


def on_stage(stage: int, stages: int, of_cells: Sequence[T]) -> Sequence[T]:
    """Returns the part of a list with an item for each cell that belongs to a stage's cells."""
    return of_cells[stage::stages]


def crosses(source: int, target: int, stages: int) -> bool:
    """Whether what goes from one cell to another is a message: the two are on different stages."""
    return stage_of(source, stages) != stage_of(target, stages)
