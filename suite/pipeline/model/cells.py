"""Which stage has which cell. All else asks here.

cell       0   1   2   3   4   5       K = 3, two cells per stage, round by round
stage      0   1   2   0   1   2
its cell   0   0   0   1   1   1       the virtual stage, ``F0.1`` of an action

stage      0   1   2   2   1   0       the same in a V: what goes from cell 2 to cell 3 stays on stage 2, and stage 0
                                       has the loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CellPlacement:
    """The stages of a pipeline's cells. Every stage has equally many, and the first cell is on stage 0."""

    stages: int
    """K."""
    cell_to_stage: tuple[int, ...] = ()
    """The stage of each cell. Empty: round by round, so cell c is on stage c mod K."""

    @property
    def loss_stage(self) -> int:
        """The stage of the last cell, which has the loss."""
        return self.cell_to_stage[-1] if self.cell_to_stage else self.stages - 1

    def stage_of(self, cell: int) -> int:
        """Returns the stage of a cell."""
        return self.cell_to_stage[cell] if self.cell_to_stage else cell % self.stages

    def virtual_stage_of(self, cell: int) -> int:
        """Returns a cell's number on its stage."""
        if not self.cell_to_stage:
            return cell // self.stages
        return _cells_by_stage(self.cell_to_stage)[self.cell_to_stage[cell]].index(cell)

    def cell_of(self, virtual_stage: int, stage: int) -> int:
        """Returns a stage's cell by its number there."""
        if not self.cell_to_stage:
            return virtual_stage * self.stages + stage
        return _cells_by_stage(self.cell_to_stage)[stage][virtual_stage]

    def on_stage(self, stage: int, of_cells: Sequence[T]) -> Sequence[T]:
        """Returns the part of a list with an item for each cell that belongs to a stage's cells."""
        if not self.cell_to_stage:
            return of_cells[stage :: self.stages]
        return [of_cells[cell] for cell in _cells_by_stage(self.cell_to_stage)[stage]]

    def crosses(self, source: int, target: int) -> bool:
        """Whether what goes from one cell to another is a message: the two are on different stages."""
        return self.stage_of(source) != self.stage_of(target)


def v_shaped(stages: int) -> tuple[int, ...]:
    """Returns the stage of each of 2 K cells in a V: down to stage K - 1, then back up."""
    return (*range(stages), *reversed(range(stages)))


@lru_cache(maxsize=64)
def _cells_by_stage(cell_to_stage: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the cells of each stage, in their order."""
    stages = range(1 + max(cell_to_stage))
    return tuple(tuple(cell for cell, its in enumerate(cell_to_stage) if its == stage) for stage in stages)
