"""One worker's engine, put together: its stage, its links to its neighbours, its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from suite.pipeline.doing import Doing
from suite.pipeline.recipe import Recipe
from suite.pipeline.skip import Routes, communicating_pairs, find_skips
from suite.pipeline.stage import Stage
from suite.pipeline.step import Executor, Way
from suite.pipeline.ties import Ties, find_ties
from suite.pipeline.topology import Groups, Place, make_groups
from suite.pipeline.transport import Deadline, LocalMessages, Transport, outstanding, warm_up
from suite.settings import OptimizerSettings
from suite.training import checkpoint
from suite.training.checkpoint import Checkpoint
from suite.training.loop import FIRST_DEADLINE
from suite.training.optimizer import StageOptimizer, named_parameters

GROUP_TIMEOUT = 300.0
"""Seconds a collective may last, unless planned steps are long: far beyond what a save point waits."""


@dataclass(frozen=True)
class Engine:
    """A worker's stage, ready to train from ``start``; ``notes`` are those of the checkpoint it was read from."""

    executor: Executor
    optimizer: StageOptimizer
    deadline: Deadline
    start: int
    notes: dict[str, Any]


def make_ways(
    place: Place, layers: Sequence[nn.Module], cells: Sequence[range], groups: Groups, device: torch.device,
    deadline: Deadline,
) -> list[Way]:  # fmt: skip
    """Returns how each of this worker's cells is bound to the others. Every rank must call this."""
    skips, ways, turns = find_skips(layers), [], len(cells) // place.stages
    unsent, local = outstanding(place.stages, turns), LocalMessages()
    for turn in range(turns):
        routes = Routes(skips, cells, turn * place.stages + place.stage)
        transport = Transport(place, groups, device, deadline, local, turn, unsent) if place.stages > 1 else None
        ways.append(Way(routes, transport))
    if place.stages > 1:
        warm_up(place, groups, device)
    return ways


def assemble(
    place: Place, layers: Sequence[nn.Module], loss: nn.Module, cells: Sequence[range], device: torch.device,
    recipe: Recipe, settings: OptimizerSettings, seed: int, find: Callable[[Stage], Checkpoint | None] = lambda _: None,
    averages_over_replicas: bool = True, begin: Callable[[Stage], None] = lambda _: None, doing: Doing | None = None,
) -> Engine:  # fmt: skip
    """Makes this worker's stage of ``recipe.turns`` cells, every K-th of ``cells``, new or from the checkpoint that
    ``find`` returns. Every rank must call this.

    Weights come before DeepSpeed, which may flatten them; optimizer state after. A stage that is new is given to
    ``begin``, which may fill it with other weights. ``doing`` is told what the worker does.
    """
    deadline = doing.deadline if doing is not None else Deadline(FIRST_DEADLINE)
    timeout = max(GROUP_TIMEOUT, deadline.seconds)
    groups = make_groups(place, timeout, communicating_pairs(find_skips(layers), cells, place.stages))
    mine, end = cells[place.stage :: place.stages], loss if place.last else None
    stage = Stage(layers, mine, end, device, settings.precision, seed, recipe.splits)
    found = find(stage)
    if found is not None:
        checkpoint.load_values(found, stage)
    else:
        begin(stage)
    named = named_parameters(stage.indices, stage.layers)
    ties = Ties(find_ties(layers, cells, place.stages), place, named, timeout)
    ties.equalise()
    update = StageOptimizer(
        stage.layers, named, len(layers), ties, place, groups, device, settings, stage.averages, averages_over_replicas
    )
    if found is not None:
        checkpoint.load_optimizer(found, stage, update)
    executor = Executor(place, stage, make_ways(place, layers, cells, groups, device, deadline), recipe, doing)
    executor.reduction = update.reduction
    return Engine(executor, update, deadline, found.step if found else 0, found.notes if found else {})
