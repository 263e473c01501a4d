"""Which schedule a pipeline runs, for any number of micro-batches: its name, cells per stage, and recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.model.topology import CellPair, TransportName
from suite.pipeline.schedule.action import Action, Schedule
from suite.pipeline.schedule.csv_file import cell_to_stage_of, micro_batches_of, parse_rows, recomputes, shape
from suite.pipeline.schedule.flow_control import FlowControl, flow_control
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS, UNLIMITED, with_recomputes
from suite.pipeline.schedule.schedules import fill_drain, interleaved, one_forward_one_backward, zero_bubble
from suite.pipeline.schedule.v_schedules import v_half, v_min, zbv
from suite.pipeline.schedule.validate import validate
from suite.settings import PipelineSettings, ScheduleName

MIN_VIRTUAL_STAGES = 2
"""The fewest cells per stage of an interleaved schedule; with one it would be 1F1B."""

_OF_ONE_CELL = {"fill_drain": fill_drain, "1f1b": one_forward_one_backward}

_OF_ANY_CELLS = {"interleaved": interleaved, "zero_bubble": zero_bubble}
"""Schedules of as many cells per stage as asked for, placed round by round."""

V_SHAPED = {"zbv": zbv, "v_half": v_half, "v_min": v_min}
"""Schedules of two cells per stage, placed in a V."""

FROM_ROWS = ("csv", "search")
"""Schedules given as rows of actions: from a file, or found by search."""

WITH_VIRTUAL_STAGES = (*_OF_ANY_CELLS, *V_SHAPED)
"""Schedules that support several cells per stage."""


@dataclass(frozen=True)
class ScheduleConfig:
    """A schedule's parameters except K and M. All workers of a run have the same."""

    schedule: ScheduleName = "fill_drain"
    max_live_graphs: tuple[int, ...] = (1,)
    """The most graphs alive at once (``suite.pipeline.schedule.remat``) in each of the K * ``virtual_stages`` cells; a
    single number applies to all."""
    virtual_stages: int = 1
    """Cells per stage."""
    rows: tuple[str, ...] = ()
    """The actions of a schedule from a file or found by search (``suite.pipeline.schedule.csv_file``)."""
    transport: TransportName = "gloo"
    """What carries the messages between stages."""
    pairs: tuple[CellPair, ...] = ()
    """The cells that exchange messages; only neighbours if empty. Skips add others."""

    @staticmethod
    def from_settings(pipeline: PipelineSettings, transport: TransportName = "gloo") -> ScheduleConfig:
        """Returns the config of settings in which nothing is ``auto``."""
        assert "auto" not in (pipeline.schedule, pipeline.remat), "the plan decides these"
        rows = (pipeline.schedule_rows or ()) if pipeline.schedule in FROM_ROWS else ()
        graphs = UNLIMITED if recomputes(rows) else MAX_LIVE_GRAPHS[pipeline.remat]
        return ScheduleConfig(pipeline.schedule, (graphs,), pipeline.virtual_stages, rows, transport)

    @property
    def defers_weight_grads(self) -> bool:
        """Whether some weight gradients are deferred."""
        schedule = parse_rows(self.rows) if self.rows else self.base_schedule(2, 1)
        return any(action.kind == "W" for actions in schedule for action in actions)

    def cell_to_stage(self, stages: int) -> tuple[int, ...]:
        """Returns the stage of each cell; an empty tuple for round by round."""
        if self.schedule in V_SHAPED:
            return v_shaped(stages)
        return cell_to_stage_of(self.rows) if self.rows else ()

    def placement(self, stages: int) -> CellPlacement:
        """Returns which of K stages has which cell."""
        return CellPlacement(stages, self.cell_to_stage(stages))

    def flow_control(self, stages: int) -> FlowControl:
        """Returns what each of K stages posts when."""
        return flow_control(self.transport, stages, self.virtual_stages)

    def actions(self, stages: int, micro_batches: int, train: bool = True) -> Schedule:
        """Returns the validated schedule of K stages and M micro-batches."""
        return [list(actions) for actions in _actions(self, stages, micro_batches, train)]

    def build(self, stages: int, micro_batches: int) -> Schedule:
        """Returns the schedule of a training step, not validated; stages with equal actions share one list."""
        with_recomputes_once = cache(with_recomputes)
        return [
            with_recomputes_once(tuple(actions), tuple(self.max_live_graphs_of(k, stages)))
            for k, actions in enumerate(self.base_schedule(stages, micro_batches))
        ]

    def forward_only(self, stages: int, micro_batches: int) -> Schedule:
        """Returns the schedule of an evaluation, not validated: the forwards of a training step in their order.

        A schedule from a file begins anew when all its micro-batches are done."""
        size = min(micro_batches, micro_batches_of(parse_rows(self.rows))) if self.rows else micro_batches
        begins = range(0, micro_batches, max(1, size))
        return [
            [
                Action("F", begin + action.micro_batch, action.virtual_stage)
                for begin in begins
                for action in actions
                if action.kind == "F" and begin + action.micro_batch < micro_batches
            ]
            for actions in self.base_schedule(stages, size)
        ]

    def max_live_graphs_of(self, stage: int, stages: int) -> Sequence[int]:
        """Returns ``max_live_graphs`` of a stage's cells."""
        cells = stages * self.virtual_stages
        each = self.max_live_graphs * cells if len(self.max_live_graphs) == 1 else self.max_live_graphs
        assert len(each) == cells, f"{len(each)} numbers of graphs for {cells} cells"
        return self.placement(stages).on_stage(stage, each)

    def base_schedule(self, stages: int, micro_batches: int) -> Schedule:
        """Returns the schedule without recomputes, not validated; nobody may change it. Raises SettingError for an
        unknown name."""
        if self.schedule in FROM_ROWS:
            rows = parse_rows(self.rows)
            return [[action for action in actions if action.micro_batch < micro_batches] for actions in rows]
        return _generated(self.schedule, stages, micro_batches, self.virtual_stages)


@lru_cache(maxsize=16)
def _generated(schedule: ScheduleName, stages: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """Cached, because a plan needs the same schedule for its memory, its recomputes and its step."""
    if schedule in _OF_ANY_CELLS:
        return _OF_ANY_CELLS[schedule](stages, micro_batches, virtual_stages)
    generators = _OF_ONE_CELL | V_SHAPED
    if schedule not in generators:
        raise SettingError(f"no schedule is called {schedule!r}; use {', '.join([*generators, *_OF_ANY_CELLS])}")
    return generators[schedule](stages, micro_batches)


@lru_cache(maxsize=256)
def _actions(config: ScheduleConfig, stages: int, micro_batches: int, train: bool) -> tuple[tuple[Action, ...], ...]:
    schedule = config.build(stages, micro_batches) if train else config.forward_only(stages, micro_batches)
    validate(schedule, micro_batches, train, config.transport, config.pairs, config.cell_to_stage(stages))
    return tuple(map(tuple, schedule))


def pipeline_errors(pipeline: PipelineSettings, layers: int) -> list[str]:
    """Returns every contradiction between schedule, K, virtual stages and number of layers, each with a remedy."""
    stages, virtual_stages, schedule = pipeline.stages, pipeline.virtual_stages, pipeline.schedule
    max_virtual_stages = layers // stages
    if schedule == "search" and not pipeline.schedule_rows:
        return ["pipeline.schedule=search is what a plan may find; use pipeline.schedule=auto to have it searched"]
    if schedule in FROM_ROWS:
        return _csv_errors(pipeline, layers)
    one_cell_remedy = "pipeline.virtual_stages=1"
    if schedule == "interleaved" or schedule in V_SHAPED:
        one_cell_remedy = "pipeline.schedule=1f1b" + (" pipeline.virtual_stages=1" if virtual_stages > 1 else "")
        if virtual_stages < MIN_VIRTUAL_STAGES or (schedule in V_SHAPED and virtual_stages > 2):
            has_layers = max_virtual_stages >= MIN_VIRTUAL_STAGES and stages > 1
            return [
                f"pipeline.schedule={schedule} needs stages of {'2' if schedule in V_SHAPED else 'several'} cells, "
                f"pipeline.virtual_stages is {virtual_stages}; "
                f"use {'pipeline.virtual_stages=2' if has_layers else one_cell_remedy}"
            ]
    if virtual_stages == 1 or schedule == "auto":
        return []
    if schedule not in WITH_VIRTUAL_STAGES:
        return [
            f"pipeline.virtual_stages is {virtual_stages}, and a stage of {schedule} holds one cell; "
            "use pipeline.virtual_stages=1 or pipeline.schedule=interleaved"
        ]
    if stages == 1:
        return [f"stages of several cells need 2 stages or more, there is 1; use {one_cell_remedy}"]
    if virtual_stages > max_virtual_stages:
        nearest = (
            f"pipeline.virtual_stages={max_virtual_stages}"
            if max_virtual_stages >= MIN_VIRTUAL_STAGES
            else one_cell_remedy
        )
        return [
            f"{stages} stages of {virtual_stages} cells need {stages * virtual_stages} layers, "
            f"the model has {layers}; use {nearest}"
        ]
    return []


def _csv_errors(pipeline: PipelineSettings, layers: int) -> list[str]:
    """Returns the contradictions between a schedule from a file, the other settings and the number of layers."""
    if not pipeline.schedule_rows:
        return ["pipeline.schedule is csv without a file; set it to the path of a CSV file, such as my_schedule.csv"]
    try:
        wanted = shape(pipeline.schedule_rows)
    except SettingError as error:
        return [f"pipeline.schedule_rows cannot run: {error}"]
    errors = [
        f"pipeline.{name} is {getattr(pipeline, name) or 'auto'}, the schedule's file has {value}; "
        "leave it out, or set another pipeline.schedule"
        for name, value in wanted.items()
        if getattr(pipeline, name) != value
    ]
    cells = wanted["stages"] * wanted["virtual_stages"]
    if cells > layers:
        errors.append(f"the schedule's file has {cells} cells, the model has {layers} layers; use a file with fewer")
    return errors
