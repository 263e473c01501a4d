"""Assembles a worker's engine: its stage, its links to other stages, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from launch.worker.distributed import GROUP_TIMEOUT_S
from launch.worker.gpu_environment import check_module_loading, check_queues
from launch.worker.links import make_links
from suite.pipeline.model.cells import on_stage, stage_of
from suite.pipeline.model.ties import TiedParameters, find_ties, stages_with_copies
from suite.pipeline.model.topology import RankCoord, make_groups, transport_of
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.runtime.skip import communicating_pairs, find_skips
from suite.pipeline.runtime.stage import Stage
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings
from suite.training import checkpoint
from suite.training.checkpoint import Checkpoint
from suite.training.stage_optimizer import StageOptimizer
from suite.training.update_rule import UpdateFactors


@dataclass(frozen=True)
class Engine:
    """A worker's stage, ready to train from step ``start``; ``notes`` come from the loaded checkpoint."""

    executor: Executor
    optimizer: StageOptimizer
    start: int
    notes: dict[str, Any]
    best_step: int | None
    """Step of the best checkpoint that is still there."""


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
    status: WorkerStatus | None = None, factors: UpdateFactors = lambda *_: (1.0, 1.0),
) -> Engine:  # fmt: skip
    """Builds this worker's stage from its cells of the model. Every rank must call this.

    ``load_weights`` may fill the new stage with other weights; if it returns a checkpoint, optimizer state and step are
    those of the checkpoint. Weights are loaded before DeepSpeed starts, because it may flatten them; optimizer state
    after. The executor reports its actions to ``status``. ``factors`` are those of the parameters' updates.
    """
    status = status or WorkerStatus()
    layers, cells = model.layers, model.cells
    timeout_s = max(GROUP_TIMEOUT_S, status.deadline.seconds)
    pairs = communicating_pairs(find_skips(layers), cells, coord.stages)
    schedule_config = replace(model.schedule_config, transport=transport_of(device), pairs=tuple(pairs))
    copies = find_ties(layers, cells, coord.stages)
    if schedule_config.transport == "nccl":
        own_pairs = [pair for pair in pairs if coord.stage in (stage_of(cell, coord.stages) for cell in pair)]
        check_module_loading(schedule_config.virtual_stages)
        check_queues(len(own_pairs), sum(coord.stage in stages for stages in stages_with_copies(copies)))
    groups = make_groups(coord, timeout_s, pairs)
    own_cells, own_loss = on_stage(coord.stage, coord.stages, cells), model.loss if coord.is_last else None
    stage = Stage(layers, own_cells, own_loss, device, settings.precision, seed, schedule_config.defers_weight_grads)
    loaded = load_weights(stage)
    ties = TiedParameters(copies, coord, stage.named_parameters(), timeout_s)
    ties.broadcast_owner()
    optimizer = StageOptimizer(stage, len(layers), ties, coord, groups, settings, sync_batchnorm_stats, factors)
    if loaded is not None:
        checkpoint.load_optimizer(loaded, optimizer)
    links = make_links(coord, layers, cells, groups, device, status.deadline, schedule_config)
    executor = Executor(coord, stage, links, schedule_config, status, getattr(model.loss, "metric_count", 1))
    executor.reducer = optimizer.reducer
    if loaded is None:
        return Engine(executor, optimizer, 0, {}, None)
    return Engine(executor, optimizer, loaded.step, loaded.notes, loaded.best_step)
