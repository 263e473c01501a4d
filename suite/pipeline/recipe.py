"""Which schedule a pipeline walks, whatever the number of micro-batches: its name, cells a stage, the rebuild dial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from suite.errors import SettingError
from suite.pipeline.action import Action, Schedule
from suite.pipeline.rebuild import GRAPHS, with_rebuilds
from suite.pipeline.schedule import fill_drain, forward_only, interleaved, one_forward_one_backward, zero_bubble
from suite.pipeline.validate import check
from suite.settings import PipelineSettings, ScheduleName

FEWEST_TURNS = 2
"""Cells a stage of an interleaved schedule holds at least; with one it would be 1F1B."""

TURNING = ("interleaved", "zero_bubble")
"""Schedules that know several cells a stage."""


@dataclass(frozen=True)
class Recipe:
    """All that decides a schedule but K and M. Every worker of a run has the same."""

    schedule: ScheduleName = "fill_drain"
    graphs: tuple[int, ...] = (1,)
    """Graphs that may stand at once (``suite.pipeline.rebuild``) in each of the K x turns cells; a single number holds
    for all."""
    turns: int = 1
    """Cells a stage holds."""

    @staticmethod
    def of(pipeline: PipelineSettings) -> Recipe:
        """Returns what the settings say where they leave nothing to the plan."""
        assert "auto" not in (pipeline.schedule, pipeline.remat), "the plan decides these"
        return Recipe(pipeline.schedule, (GRAPHS[pipeline.remat],), pipeline.turns)

    @property
    def splits(self) -> bool:
        """Whether weights' gradients are put off."""
        return self.schedule == "zero_bubble"

    def actions(self, stages: int, micro_batches: int, train: bool = True) -> Schedule:
        """Returns the validated schedule of K stages and M micro-batches."""
        return [list(actions) for actions in _actions(self, stages, micro_batches, train)]

    def unchecked(self, stages: int, micro_batches: int) -> Schedule:
        """Returns the schedule of a training step, not validated; stages that do the same share one list."""
        known: dict[tuple[tuple[Action, ...], tuple[int, ...]], list[Action]] = {}
        schedule = []
        for k, actions in enumerate(self.bare(stages, micro_batches)):
            one = tuple(actions), tuple(self.graphs_of(k, stages))
            if one not in known:
                known[one] = with_rebuilds(*one)
            schedule.append(known[one])
        return schedule

    def graphs_of(self, stage: int, stages: int) -> Sequence[int]:
        """Returns the dial of a stage's cells."""
        cells = stages * self.turns
        each = self.graphs * cells if len(self.graphs) == 1 else self.graphs
        assert len(each) == cells, f"{len(each)} dials for {cells} cells"
        return each[stage::stages]

    def bare(self, stages: int, micro_batches: int) -> Schedule:
        """Returns the schedule without rebuilds, not validated. Raises SettingError for a name that none has."""
        if self.schedule == "interleaved":
            return interleaved(stages, micro_batches, self.turns)
        if self.schedule == "zero_bubble":
            return zero_bubble(stages, micro_batches, self.turns)
        if self.schedule == "1f1b":
            return one_forward_one_backward(stages, micro_batches)
        if self.schedule == "fill_drain":
            return fill_drain(stages, micro_batches)
        raise SettingError(f"no schedule is called {self.schedule!r}; use fill_drain, 1f1b, interleaved or zero_bubble")


@lru_cache(maxsize=256)
def _actions(recipe: Recipe, stages: int, micro_batches: int, train: bool) -> tuple[tuple[Action, ...], ...]:
    schedule = recipe.unchecked(stages, micro_batches) if train else forward_only(stages, micro_batches, recipe.turns)
    check(schedule, micro_batches, train)
    return tuple(map(tuple, schedule))


def faults(pipeline: PipelineSettings, layers: int) -> list[str]:
    """Returns all in which schedule, K, turns and the number of layers contradict each other, with what would do."""
    stages, turns, schedule = pipeline.stages, pipeline.turns, pipeline.schedule
    most = layers // stages
    instead = "pipeline.turns=1"
    if schedule == "interleaved":
        instead = "pipeline.schedule=1f1b" + (" pipeline.turns=1" if turns > 1 else "")
    if schedule == "interleaved" and turns < FEWEST_TURNS:
        nearest = "pipeline.turns=2" if most >= FEWEST_TURNS and stages > 1 else instead
        return [f"pipeline.schedule=interleaved needs stages of several cells, pipeline.turns is 1; use {nearest}"]
    if turns == 1 or schedule == "auto":
        return []
    if schedule not in TURNING:
        return [
            f"pipeline.turns is {turns}, and a stage of {schedule} holds one cell; "
            "use pipeline.turns=1 or pipeline.schedule=interleaved"
        ]
    if stages == 1:
        return [f"stages of several cells need 2 stages or more, there is 1; use {instead}"]
    if turns > most:
        nearest = f"pipeline.turns={most}" if most >= FEWEST_TURNS else instead
        return [f"{stages} stages of {turns} cells need {stages * turns} layers, the model has {layers}; use {nearest}"]
    return []
