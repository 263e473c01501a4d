"""Builds what a worker trains with: its stage of a model, its links to other stages, and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from launch.worker.distributed import GROUP_TIMEOUT_S
from launch.worker.gpu_environment import check_module_loading, check_queues
from suite.pipeline.model.ties import TiedParameters, find_ties, stages_with_copies
from suite.pipeline.model.topology import ProcessGroups, RankCoord, make_groups, transport_of, warm_up
from suite.pipeline.runtime.executor import CellLinks, Executor
from suite.pipeline.runtime.p2p import LocalMessages, MessageTimeout, P2PCommunicator
from suite.pipeline.runtime.skip import SkipLayout, communicating_pairs, find_skips
from suite.pipeline.runtime.stage import Stage
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings
from suite.training.stage_optimizer import StageOptimizer
from suite.training.update_rule import UpdateFactors


@dataclass(frozen=True)
class PartitionedModel:
    """A model on the meta device with its loss, the layers of each cell, and the schedule."""

    layers: Sequence[nn.Module]
    loss: nn.Module
    cells: Sequence[range]
    schedule_config: ScheduleConfig


def make_executor(
    coord: RankCoord,
    model: PartitionedModel,
    device: torch.device,
    precision: str,
    seed: int,
    status: WorkerStatus | None = None,
) -> tuple[Executor, ProcessGroups]:
    """Builds this worker's stage from its cells of the model, and its links. Every rank must call this. The executor
    reports its actions to ``status``."""
    status, layers, cells = status or WorkerStatus(), model.layers, model.cells
    placement = model.schedule_config.placement(coord.stages)
    assert coord.placement == placement, "the coordinates are of another schedule"
    pairs = communicating_pairs(find_skips(layers), cells, coord.placement)
    schedule_config = replace(model.schedule_config, transport=transport_of(device), pairs=tuple(pairs))
    model = replace(model, schedule_config=schedule_config)
    if schedule_config.transport == "nccl":
        own_pairs = [pair for pair in pairs if coord.stage in map(coord.placement.stage_of, pair)]
        ties = stages_with_copies(find_ties(layers, cells, coord.placement))
        check_module_loading(schedule_config.virtual_stages)
        check_queues(len(own_pairs), sum(coord.stage in stages for stages in ties))
    groups = make_groups(coord, _group_timeout_s(status), pairs)
    own_cells, own_loss = coord.placement.on_stage(coord.stage, cells), model.loss if coord.has_loss else None
    stage = Stage(layers, own_cells, own_loss, device, precision, seed, schedule_config.defers_weight_grads)
    links = make_links(coord, model, groups, device, status.message_timeout)
    return Executor(coord, stage, links, schedule_config, status, getattr(model.loss, "metric_count", 1)), groups


def make_links(
    coord: RankCoord, model: PartitionedModel, groups: ProcessGroups, device: torch.device, timeout: MessageTimeout
) -> list[CellLinks]:
    """Returns the links of each of this worker's cells to other cells. Every rank must call this."""
    skips, links = find_skips(model.layers), []
    flow, local = model.schedule_config.flow_control(coord.stages), LocalMessages()
    for virtual_stage in range(model.schedule_config.virtual_stages):
        skip_layout = SkipLayout(skips, model.cells, coord.placement.cell_of(virtual_stage, coord.stage))
        p2p = None
        if coord.stages > 1:
            p2p = P2PCommunicator(coord, groups, device, timeout, local, virtual_stage, flow)
        links.append(CellLinks(skip_layout, p2p))
    warm_up(coord, groups, device)
    return links


def make_stage_optimizer(
    executor: Executor,
    groups: ProcessGroups,
    model: PartitionedModel,
    settings: OptimizerSettings,
    sync_batchnorm_stats: bool = True,
    factors: UpdateFactors = lambda *_: (1.0, 1.0),
) -> StageOptimizer:
    """Builds the optimizer of an executor's stage, with ``factors`` of the parameters' updates; the executor passes the
    gradients to it. Every rank must call this. The stage must have its weights: DeepSpeed may flatten them."""
    coord, stage = executor.coord, executor.stage
    copies = find_ties(model.layers, model.cells, coord.placement)
    ties = TiedParameters(copies, coord, stage.named_parameters(), _group_timeout_s(executor.status))
    ties.broadcast_first_copy()
    optimizer = StageOptimizer(stage, len(model.layers), ties, coord, groups, settings, sync_batchnorm_stats, factors)
    executor.reducer = optimizer.reducer
    return optimizer


def _group_timeout_s(status: WorkerStatus) -> float:
    return max(GROUP_TIMEOUT_S, status.message_timeout.seconds)
