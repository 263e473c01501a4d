"""A pipeline of one stage with its update, in this process: the suite's own stage, executor and optimizer.

DeepSpeed is not there, because a machine that is only checked need not have it: with K = R = 1 it wraps the very
optimizer that steps here (``suite.training.optimizer.lone_update``) and shards nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from launch.gpu.work import Work
from suite.pipeline.boundary import Front, TensorSpec
from suite.pipeline.microbatch import MiniBatch
from suite.pipeline.rebuild import GRAPHS
from suite.pipeline.recipe import Recipe
from suite.pipeline.skip import Routes, find_skips
from suite.pipeline.stage import Kept, Stage
from suite.pipeline.step import Executor, Way
from suite.pipeline.ties import Ties, find_ties
from suite.pipeline.topology import Place
from suite.settings import OptimizerSettings, Remat
from suite.training.optimizer import lone_update, named_parameters

REMAT: Remat = "except_last"
"""As the paper has it: every micro-batch but the last is rebuilt."""

_RECIPE = Recipe(graphs=(GRAPHS[REMAT],))


def rebuilt(micro_batches: int) -> int:
    """Returns how many micro-batches' forwards are run again."""
    (actions,) = _RECIPE.actions(1, micro_batches)
    return sum(action.kind == "R" for action in actions)


class Lone:
    """Trains a work on one device."""

    def __init__(self, work: Work, device: torch.device, settings: OptimizerSettings) -> None:
        """Makes the stage, with bf16 or fp32 products as ``settings`` say, and the mini-batch."""
        self.work, self.device = work, device
        cells = [range(len(work.layers))]
        self.stage = Stage(work.layers, cells, work.loss, device, settings.precision, seed=0)
        place, self._routes = Place(0, 1, 1), Routes(find_skips(work.layers), cells, 0)
        self.executor = Executor(place, self.stage, [Way(self._routes, None)], _RECIPE)
        named = named_parameters(self.stage.indices, self.stage.layers)
        self._ties = Ties(find_ties(work.layers, cells, 1), place, named, 0.0)
        self._ties.equalise()
        self._update = lone_update(self.stage.layers, settings)
        self.batch: MiniBatch = work.batch(device)

    def train(self, step: int, batch: MiniBatch | None = None) -> float:
        """Forward, rebuild, backward of a mini-batch; returns its loss, a mean over tokens."""
        batch = batch or self.batch
        return self.executor.train(batch, step).objective / batch.weight

    def update(self) -> None:
        """Clips and steps as a stage does, and clears the gradients."""
        self._ties.sum_gradients()
        self._update()
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients."""
        for parameter in self.stage.layers.parameters():
            parameter.grad = None

    def rebuild_equals_forward(self, batch: MiniBatch | None = None) -> bool:
        """Runs the first micro-batch without graph and with one; returns whether the losses have the same bits.

        Where they have not, a stage before the last sends on another activation than the one it differentiates.
        """
        self.stage.train(True)
        batch = batch or self.batch
        inputs, targets = (tuple(t.to(self.device) for t in part[0]) for part in (batch.inputs, batch.targets))
        arriving = self._routes.arriving(Front(tuple(map(TensorSpec.of, inputs))))
        with torch.no_grad():
            (plain,), _ = self.stage.forward(inputs, arriving, None, targets, 0, 0)
        (rebuilt,), _ = self.stage.graph(Kept(inputs), arriving, None, targets, 0, 0)
        return bool(torch.equal(plain, rebuilt.detach()))


def synchronise(device: torch.device) -> None:
    """Waits until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(what: Callable[[], object], device: torch.device) -> float:
    """Returns how long it takes, the device's work included."""
    synchronise(device)
    begin = time.perf_counter()
    what()
    synchronise(device)
    return time.perf_counter() - begin


def forget(device: torch.device) -> None:
    """Gives the allocator's free memory back, so that the next work finds the device as the first did."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
