"""Assembles a worker's engine: its stage, its links to other stages, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from suite.pipeline.model.ties import TiedParameters, find_ties
from suite.pipeline.model.topology import ProcessGroups, RankCoord, make_groups
from suite.pipeline.runtime.executor import CellLinks, Executor
from suite.pipeline.runtime.p2p import Deadline, LocalMessages, P2PCommunicator, warm_up
from suite.pipeline.runtime.skip import SkipLayout, communicating_pairs, find_skips
from suite.pipeline.runtime.stage import Stage
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.flow_control import max_inflight_sends
from suite.settings import OptimizerSettings
from suite.training import checkpoint
from suite.training.checkpoint import Checkpoint
from suite.training.loop import FIRST_DEADLINE
from suite.training.optimizer import StageOptimizer, named_parameters

GROUP_TIMEOUT = 300.0
"""Timeout of a collective in seconds, unless planned steps are long; much longer than the wait for a checkpoint."""


@dataclass(frozen=True)
class Engine:
    """A worker's stage, ready to train from step ``start``; ``notes`` come from the loaded checkpoint."""

    executor: Executor
    optimizer: StageOptimizer
    deadline: Deadline
    start: int
    notes: dict[str, Any]


def make_links(
    coord: RankCoord, layers: Sequence[nn.Module], cells: Sequence[range], groups: ProcessGroups, device: torch.device,
    deadline: Deadline,
) -> list[CellLinks]:  # fmt: skip
    """Returns the links of each of this worker's cells to other cells. Every rank must call this."""
    skips, links, virtual_stages = find_skips(layers), [], len(cells) // coord.stages
    max_sends, local = max_inflight_sends(coord.stages, virtual_stages), LocalMessages()
    for virtual_stage in range(virtual_stages):
        skip_layout = SkipLayout(skips, cells, virtual_stage * coord.stages + coord.stage)
        p2p = None
        if coord.stages > 1:
            p2p = P2PCommunicator(coord, groups, device, deadline, local, virtual_stage, max_sends)
        links.append(CellLinks(skip_layout, p2p))
    if coord.stages > 1:
        warm_up(coord, groups, device)
    return links


def assemble(
    coord: RankCoord,
    layers: Sequence[nn.Module],
    loss: nn.Module,
    cells: Sequence[range],
    device: torch.device,
    schedule_config: ScheduleConfig,
    settings: OptimizerSettings,
    seed: int,
    find_checkpoint: Callable[[Stage], Checkpoint | None] = lambda _: None,
    sync_batchnorm_stats: bool = True,
    initialize: Callable[[Stage], None] = lambda _: None,
    status: WorkerStatus | None = None,
) -> Engine:
    """Builds this worker's stage from every K-th of ``cells``, new or from the checkpoint that ``find_checkpoint``
    returns. Every rank must call this.

    Weights are loaded before DeepSpeed starts, because it may flatten them; optimizer state after. ``initialize`` may
    fill a new stage with other weights. The executor reports its actions to ``status``.
    """
    deadline = status.deadline if status is not None else Deadline(FIRST_DEADLINE)
    timeout = max(GROUP_TIMEOUT, deadline.seconds)
    groups = make_groups(coord, timeout, communicating_pairs(find_skips(layers), cells, coord.stages))
    own_cells, own_loss = cells[coord.stage :: coord.stages], loss if coord.is_last else None
    stage = Stage(layers, own_cells, own_loss, device, settings.precision, seed, schedule_config.defers_weight_grads)
    loaded = find_checkpoint(stage)
    if loaded is not None:
        checkpoint.load_values(loaded, stage)
    else:
        initialize(stage)
    parameters = named_parameters(stage.indices, stage.layers)
    ties = TiedParameters(find_ties(layers, cells, coord.stages), coord, parameters, timeout)
    ties.broadcast_owner()
    optimizer = StageOptimizer(
        stage.layers, parameters, len(layers), ties, coord, groups, device, settings, stage.running_stats,
        sync_batchnorm_stats,
    )  # fmt: skip
    if loaded is not None:
        checkpoint.load_optimizer(loaded, stage, optimizer)
    links = make_links(coord, layers, cells, groups, device, deadline)
    executor = Executor(coord, stage, links, schedule_config, status)
    executor.reducer = optimizer.reducer
    return Engine(executor, optimizer, deadline, loaded.step if loaded else 0, loaded.notes if loaded else {})
