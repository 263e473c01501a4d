"""A schedule of your own, from a CSV file in the format of torch.distributed.pipelining: a line for each stage.

    0F0,0F1,2F0,2F1,,2B0,2B1,0B0,0B1        the first number is the cell, which torch calls a stage; then the kind of
    1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1         action and the micro-batch; empty fields are idle time

``_dump_csv(path, format="compute_only")`` of torch's schedules writes such files. Kinds are F, B, I and W; the suite
adds recomputes (``remat``), unless the file has its own, of kind R. Of a pair that torch overlaps,
``(0F3;7B1)OVERLAP_F_B``, one action runs after the other. A cell belongs to the stage whose line has it: round by round
as here, in a V, or in any other way in which every stage has equally many and the first line has cell 0.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.schedule.action import Action, ActionKind, Schedule, virtual_stages_of
from suite.pipeline.schedule.validate import validate

SUFFIX = ".csv"

_ACTION = re.compile(r"(\d{1,9})([FRIBW])(\d{1,9})")
_OVERLAPPED = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_MESSAGE = re.compile(r"\d+(SEND|RECV)_[FB]\d+")


def read_rows(path: Path) -> tuple[str, ...]:
    """Returns the actions of each stage as one text, with blanks between, checked.

    Raises SettingError, naming file and line, when the file cannot be read or is no valid schedule.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            fields = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise SettingError(
            f"the schedule {path} cannot be read: {getattr(error, 'strerror', None) or error}; pipeline.schedule takes "
            "a CSV file with a line for each stage, or the name of a schedule"
        ) from None
    rows = tuple(_OVERLAPPED.sub(r"\1 \2", " ".join(filter(None, map(str.strip, line)))) for line in fields)
    while rows and not rows[-1]:
        rows = rows[:-1]
    if not rows:
        raise SettingError(f"the schedule {path} is empty; it needs a line of actions for each stage")
    try:
        schedule = parse_rows(rows)
        validate(schedule, micro_batches_of(schedule), cell_to_stage=cell_to_stage_of(rows))
    except SettingError as error:
        raise SettingError(f"the schedule {path} cannot run: {error}") from None
    return rows


@lru_cache(maxsize=8)
def parse_rows(rows: tuple[str, ...]) -> Schedule:
    """Returns the schedule of the rows of ``read_rows``; nobody may change it. Raises SettingError for what is no
    action, and as ``cell_to_stage_of`` does."""
    placement = CellPlacement(len(rows), cell_to_stage_of(rows))
    return [[Action(kind, i, placement.virtual_stage_of(cell)) for cell, kind, i in row] for row in _fields(rows)]


@lru_cache(maxsize=8)
def cell_to_stage_of(rows: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the stage of each cell, or nothing if cells go round by round, as ``CellPlacement`` has them.

    Raises SettingError when a cell has two stages or none, stages have unequal numbers of cells, or cell 0 is not on
    stage 0.
    """
    cell_to_stage: dict[int, int] = {}
    for stage, row in enumerate(_fields(rows)):
        for cell in dict.fromkeys(cell for cell, _, _ in row):
            if cell in cell_to_stage:
                raise SettingError(
                    f"cell {cell} is in lines {cell_to_stage[cell] + 1} and {stage + 1}; a cell belongs to one stage"
                )
            cell_to_stage[cell] = stage
    if not cell_to_stage:
        raise SettingError("there are no actions; every line needs some, such as 0F0")
    cells = 1 + max(cell_to_stage)
    if cells > len(cell_to_stage):
        missing = next(cell for cell in range(cells) if cell not in cell_to_stage)
        raise SettingError(f"no line has cell {missing}, and there are cells up to {cells - 1}; leave none out")
    counts = Counter(cell_to_stage.values())
    if len({counts[stage] for stage in range(len(rows))}) > 1:
        each = ", ".join(str(counts[stage]) for stage in range(len(rows)))
        raise SettingError(f"the lines have {each} cells; every stage needs equally many, one at least")
    if cell_to_stage[0] != 0:
        raise SettingError(
            f"cell 0 is in line {cell_to_stage[0] + 1}; it must be in the first, so change the order of lines"
        )
    in_order = tuple(cell_to_stage[cell] for cell in range(cells))
    return () if in_order == tuple(cell % len(rows) for cell in range(cells)) else in_order


def rows_of(schedule: Schedule, placement: CellPlacement) -> tuple[str, ...]:
    """Returns the rows that ``parse_rows`` reads as this schedule."""
    return tuple(
        " ".join(f"{action.cell(stage, placement)}{action.kind}{action.micro_batch}" for action in actions)
        for stage, actions in enumerate(schedule)
    )


def recomputes(rows: Sequence[str]) -> bool:
    """Whether the rows say themselves what is recomputed."""
    return any("R" in row for row in rows)


def micro_batches_of(schedule: Schedule) -> int:
    """Returns M, the number of micro-batches."""
    return 1 + max((action.micro_batch for actions in schedule for action in actions), default=0)


def shape(rows: tuple[str, ...]) -> dict[str, int]:
    """Returns the values of ``PipelineSettings`` that rows determine."""
    schedule = parse_rows(rows)
    return {
        "stages": len(schedule),
        "micro_batches": micro_batches_of(schedule),
        "virtual_stages": virtual_stages_of(schedule),
    }


def _fields(rows: Sequence[str]) -> list[list[tuple[int, ActionKind, int]]]:
    """Returns cell, kind and micro-batch of each action."""
    return [[_field(text, f"line {line} has {text!r}") for text in row.split()] for line, row in enumerate(rows, 1)]


def _field(text: str, where: str) -> tuple[int, ActionKind, int]:
    if _MESSAGE.fullmatch(text):
        raise SettingError(f'{where}, a message; save only the computations (torch: format "compute_only")')
    match = _ACTION.fullmatch(text)
    if match is None:
        raise SettingError(f"{where}, which is no action; actions look like 0F3, 0B3, 0I3 or 0W3")
    return int(match[1]), match[2], int(match[3])  # type: ignore[return-value]
