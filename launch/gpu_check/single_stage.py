"""A pipeline of one stage with its update, in this process: the suite's stage, executor and optimizer.

It does not use DeepSpeed, which a checked machine need not have: with K = R = 1 DeepSpeed wraps the same optimizer
(``suite.training.optimizer.single_device_update``) and shards nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from launch.gpu_check.work import SCHEDULE_CONFIG, Workload
from suite.device import is_host, module_of, synchronize
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.ties import TiedParameters, find_ties
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.executor import CellLinks, Executor
from suite.pipeline.runtime.skip import SkipLayout, find_skips
from suite.pipeline.runtime.stage import Stage
from suite.settings import OptimizerSettings
from suite.training.stage_optimizer import single_device_update


class SingleStageTrainer:
    """Trains a work on one device."""

    def __init__(self, work: Workload, device: torch.device, settings: OptimizerSettings) -> None:
        """Builds the stage with the precision of ``settings``, and the mini-batch."""
        self.work, self.device = work, device
        cells = [range(len(work.layers))]
        self.stage = Stage(work.layers, cells, work.loss, device, settings.precision, seed=0)
        coord, links = RankCoord(0, 1, 1), [CellLinks(SkipLayout(find_skips(work.layers), cells, 0), None)]
        self.executor = Executor(coord, self.stage, links, SCHEDULE_CONFIG)
        self._ties = TiedParameters(find_ties(work.layers, cells, 1), coord, self.stage.named_parameters(), 0.0)
        self._ties.broadcast_owner()
        self._update = single_device_update(self.stage.layers, settings)
        self.batch: MiniBatch = work.batch(device)

    def train(self, step: int, batch: MiniBatch | None = None) -> float:
        """Runs forward, recomputation and backward of a mini-batch; returns its mean loss a token."""
        batch = batch or self.batch
        return self.executor.train(batch, step).objective / batch.weight

    def update(self) -> None:
        """Clips the gradients and updates as a stage does, then clears the gradients."""
        self._ties.sum_gradients()
        self._update()
        self.clear()

    def clear(self) -> None:
        """Drops the gradients."""
        for parameter in self.stage.layers.parameters():
            parameter.grad = None


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of an action, the device's work included."""
    synchronize(device)
    begin = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - begin


def empty_cache(device: torch.device) -> None:
    """Frees the allocator's cached memory, so that each work starts with an empty device."""
    if not is_host(device):
        module_of(device).empty_cache()
