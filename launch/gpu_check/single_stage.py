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
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.executor import CellLinks, Executor
from suite.pipeline.runtime.skip import SkipLayout, find_skips
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.settings import OptimizerSettings
from suite.training.optimizer import single_device_update


class SingleStageTrainer:
    """Trains a work on one device."""

    def __init__(self, work: Workload, device: torch.device, settings: OptimizerSettings) -> None:
        """Builds the stage with the precision of ``settings``, and the mini-batch."""
        self.work, self.device = work, device
        cells = [range(len(work.layers))]
        self.stage = Stage(work.layers, cells, work.loss, device, settings.precision, seed=0)
        coord, self._skip_layout = RankCoord(0, 1, 1), SkipLayout(find_skips(work.layers), cells, 0)
        self.executor = Executor(coord, self.stage, [CellLinks(self._skip_layout, None)], SCHEDULE_CONFIG)
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

    def recompute_equals_forward(self, batch: MiniBatch | None = None) -> bool:
        """Runs the first micro-batch without and with a graph; returns whether the losses are bit-identical.

        If they are not, a stage before the last sends another activation than the one it differentiates.
        """
        self.stage.train(True)
        batch = batch or self.batch
        inputs, targets = (tuple(t.to(self.device) for t in part[0]) for part in (batch.inputs, batch.targets))
        arriving = self._skip_layout.input_boundary(CutSpec.of(inputs))
        micro_batch = CellMicroBatch(inputs, arriving, output_boundary=None)
        with torch.no_grad():
            (plain,), _ = self.stage.forward(micro_batch, targets)
        (recomputed,), _ = self.stage.forward_with_graph(micro_batch, targets)
        return bool(torch.equal(plain, recomputed.detach()))


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
