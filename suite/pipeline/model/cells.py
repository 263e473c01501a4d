"""Which stage owns which cell. All else asks here.

cell       0   1   2   3   4   5       K = 3, two cells a stage, round by round
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
    """The stages of a pipeline's cells. Every stage owns equally many, and the first cell is on stage 0."""

    stages: int
    """K."""
    owners: tuple[int, ...] = ()
    """The stage of each cell. Empty: round by round, for any number of cells."""

    @property
    def last_stage(self) -> int:
        """The stage of the last cell, which has the loss."""
        return self.owners[-1] if self.owners else self.stages - 1

    def stage_of(self, cell: int) -> int:
        """Returns the stage that owns a cell."""
        return self.owners[cell] if self.owners else cell % self.stages

    def virtual_stage_of(self, cell: int) -> int:
        """Returns a cell's number on its stage."""
        if not self.owners:
            return cell // self.stages
        return _cells_by_stage(self.owners)[self.owners[cell]].index(cell)

    def cell_of(self, virtual_stage: int, stage: int) -> int:
        """Returns a stage's cell by its number there."""
        if not self.owners:
            return virtual_stage * self.stages + stage
        return _cells_by_stage(self.owners)[stage][virtual_stage]

    def on_stage(self, stage: int, of_cells: Sequence[T]) -> Sequence[T]:
        """Returns the part of a list with an item for each cell that belongs to a stage's cells."""
        if not self.owners:
            return of_cells[stage :: self.stages]
        return [of_cells[cell] for cell in _cells_by_stage(self.owners)[stage]]

    def crosses(self, source: int, target: int) -> bool:
        """Whether what goes from one cell to another is a message: the two are on different stages."""
        return self.stage_of(source) != self.stage_of(target)


def v_shaped(stages: int) -> tuple[int, ...]:
    """Returns the owners of 2 K cells in a V: down to stage K - 1, then back up."""
    return (*range(stages), *reversed(range(stages)))


@lru_cache(maxsize=64)
def _cells_by_stage(owners: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the cells of each stage, in their order."""
    return tuple(tuple(cell for cell, owner in enumerate(owners) if owner == stage) for stage in range(1 + max(owners)))
