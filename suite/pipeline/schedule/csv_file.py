"""A schedule of your own, from a CSV file in the format of torch.distributed.pipelining: a line for each stage.

    0F0,0F1,2F0,2F1,,2B0,2B1,0B0,0B1        the first number is the cell, which torch calls a stage; then the kind of
    1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1         action and the micro-batch; empty fields are idle time

``_dump_csv(path, format="compute_only")`` of torch's schedules writes such files. Kinds are F, B, I and W; the suite
adds recomputes (``remat``). Cell v * K + k must be on stage k, as in torch's looped schedules; V-shaped placements are
refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from suite.errors import SettingError
from suite.pipeline.model.cells import stage_of, virtual_stage_of
from suite.pipeline.schedule.action import Action, Schedule, virtual_stages_of
from suite.pipeline.schedule.validate import validate

SUFFIX = ".csv"

_ACTION = re.compile(r"(\d+)([FIBW])(\d+)")
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
    rows = tuple(" ".join(filter(None, map(str.strip, line))) for line in fields)
    while rows and not rows[-1]:
        rows = rows[:-1]
    if not rows:
        raise SettingError(f"the schedule {path} is empty; it needs a line of actions for each stage")
    try:
        schedule = parse_rows(rows)
        validate(schedule, micro_batches_of(schedule))
    except SettingError as error:
        raise SettingError(f"the schedule {path} cannot run: {error}") from None
    return rows


@lru_cache(maxsize=8)
def _parsed(rows: tuple[str, ...]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(_action(text, stage, len(rows)) for text in row.split()) for stage, row in enumerate(rows))


def parse_rows(rows: Sequence[str]) -> Schedule:
    """Returns the schedule of the rows of ``read_rows``. Raises SettingError for what is no action, or on another
    stage than its cell."""
    return [list(actions) for actions in _parsed(tuple(rows))]


def micro_batches_of(schedule: Schedule) -> int:
    """Returns M, the number of micro-batches."""
    return 1 + max((action.micro_batch for actions in schedule for action in actions), default=0)


def first_micro_batches(schedule: Schedule, count: int) -> Schedule:
    """Returns the schedule of a mini-batch with fewer micro-batches: what remains keeps its order."""
    return [[action for action in actions if action.micro_batch < count] for actions in schedule]


def shape(rows: Sequence[str]) -> dict[str, int]:
    """Returns the values of ``PipelineSettings`` that rows determine."""
    schedule = parse_rows(rows)
    return {
        "stages": len(schedule),
        "micro_batches": micro_batches_of(schedule),
        "virtual_stages": virtual_stages_of(schedule),
    }


def _action(text: str, stage: int, stages: int) -> Action:
    where = f"line {stage + 1} has {text!r}"
    if _MESSAGE.fullmatch(text):
        raise SettingError(f'{where}, a message; save only the computations (torch: format "compute_only")')
    match = _ACTION.fullmatch(text)
    if match is None:
        raise SettingError(f"{where}, which is no action; actions look like 0F3, 0B3, 0I3 or 0W3")
    cell, kind, micro_batch = match.groups()
    virtual_stage, owner = virtual_stage_of(int(cell), stages), stage_of(int(cell), stages)
    if owner != stage:
        raise SettingError(
            f"{where}, and with {stages} stages cell {cell} is on stage {owner} (cell v * K + k on stage k); "
            "V-shaped placements are not supported"
        )
    return Action(kind, int(micro_batch), virtual_stage)  # type: ignore[arg-type]
