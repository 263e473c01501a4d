"""The schedules for which ``pipeline.schedule=auto`` stands: named ones; where none fits, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.schedule.config import MIN_VIRTUAL_STAGES, pipeline_errors
from suite.pipeline.schedule.csv_file import rows_of
from suite.pipeline.schedule.schedules import one_by_one
from suite.settings import PipelineSettings

SEARCHED_REMAT = ("auto", "never")
"""The values of ``pipeline.remat`` with which there is a search."""


def candidates(pipeline: PipelineSettings, layers: int) -> Iterator[PipelineSettings]:
    """Yields the settings with each schedule that they allow, the simplest first."""
    several = max(MIN_VIRTUAL_STAGES, pipeline.virtual_stages)
    choices = [
        *product(("fill_drain", "1f1b", "zero_bubble"), [1]),
        *product(("interleaved", "zero_bubble"), [several]),
        *product(("zbv", "v_half", "v_min"), [2]),
    ]
    for name, virtual_stages in choices:
        yield from _allowed(pipeline, layers, {"schedule": name, "virtual_stages": virtual_stages})


def least_candidates(pipeline: PipelineSettings, layers: int) -> Iterator[PipelineSettings]:
    """Yields the settings with schedules that need the least memory."""
    stages, micro_batches, remat = pipeline.stages, pipeline.micro_batches, pipeline.remat
    if stages == 1 or remat not in SEARCHED_REMAT:
        return
    for virtual_stages in (1, max(MIN_VIRTUAL_STAGES, pipeline.virtual_stages)):
        schedule = one_by_one(stages, micro_batches, virtual_stages, remat == "auto")
        update = {"schedule": "search", "virtual_stages": virtual_stages, "remat": "never"}
        rows = rows_of(schedule, CellPlacement(stages))
        yield from _allowed(pipeline, layers, update | {"schedule_rows": rows})


def _allowed(pipeline: PipelineSettings, layers: int, update: dict[str, Any]) -> Iterator[PipelineSettings]:
    """Yields the settings with a schedule, if they allow it."""
    candidate = pipeline.model_copy(update={"schedule_rows": None} | update)
    has_cells = pipeline.layers_per_cell is None or candidate.virtual_stages == pipeline.virtual_stages
    if has_cells and not pipeline_errors(candidate, layers):
        yield candidate
