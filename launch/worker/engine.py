"""Assembles a worker's engine: its stage, its links to other stages, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from launch.worker.distributed import GROUP_TIMEOUT_S
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
from suite.training.optimizer import StageOptimizer


@dataclass(frozen=True)
class Engine:
    """A worker's stage, ready to train from step ``start``; ``notes`` come from the loaded checkpoint."""

    executor: Executor
    optimizer: StageOptimizer
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


@dataclass(frozen=True)
class PartitionedModel:
    """A model on the meta device with its loss, the layers of each cell, and the schedule."""

    layers: Sequence[nn.Module]
    loss: nn.Module
    cells: Sequence[range]
    schedule_config: ScheduleConfig


def assemble(
    coord: RankCoord, model: PartitionedModel, device: torch.device, settings: OptimizerSettings, seed: int,
    load_weights: Callable[[Stage], Checkpoint | None] = lambda _: None, sync_batchnorm_stats: bool = True,
    status: WorkerStatus | None = None,
) -> Engine:  # fmt: skip
    """Builds this worker's stage from every K-th of the model's cells. Every rank must call this.

    ``load_weights`` may fill the new stage with other weights; if it returns a checkpoint, optimizer state and step are
    those of the checkpoint. Weights are loaded before DeepSpeed starts, because it may flatten them; optimizer state
    after. The executor reports its actions to ``status``.
    """
    status = status or WorkerStatus()
    layers, cells, schedule_config = model.layers, model.cells, model.schedule_config
    timeout_s = max(GROUP_TIMEOUT_S, status.deadline.seconds)
    groups = make_groups(coord, timeout_s, communicating_pairs(find_skips(layers), cells, coord.stages))
    own_cells, own_loss = cells[coord.stage :: coord.stages], model.loss if coord.is_last else None
    stage = Stage(layers, own_cells, own_loss, device, settings.precision, seed, schedule_config.defers_weight_grads)
    loaded = load_weights(stage)
    ties = TiedParameters(find_ties(layers, cells, coord.stages), coord, stage.named_parameters(), timeout_s)
    ties.broadcast_owner()
    optimizer = StageOptimizer(stage, len(layers), ties, coord, groups, settings, sync_batchnorm_stats)
    if loaded is not None:
        checkpoint.load_optimizer(loaded, optimizer)
    links = make_links(coord, layers, cells, groups, device, status.deadline)
    executor = Executor(coord, stage, links, schedule_config, status)
    executor.reducer = optimizer.reducer
    return Engine(executor, optimizer, loaded.step if loaded else 0, loaded.notes if loaded else {})
