"""torchgpipe 0.0.5 (an extra of this project): one process, its partitions on the device ``cpu``.

It was made for GPUs, whose kernels run on after the call. On CPUs it gives all partitions one worker thread, and the
backward is autograd's, which has one CPU thread too: nothing overlaps, so its row is a check of gradients more than a
race.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from experiments.benchmark.peers.cell import Cell
from experiments.benchmark.peers.peer import BenchContext, Gradients
from experiments.benchmark.peers.work import Work
from suite.pipeline.planning.partition import cell_ranges

MOST_STAGES = 4


def refusal(work: Work, checkpoint: str) -> str | None:
    """Returns why it cannot or should not run a work."""
    if importlib.util.find_spec("torchgpipe") is None:
        return "torchgpipe is not installed: pip install 'gpipe-suite[peers]'"
    if work.name == "translation" and checkpoint != "never":
        return "its recomputing backward needs a gradient for every tensor between stages, and ids and masks have none"
    if work.replicas > 1:
        return "one process: no replicas"
    if work.name == "sleeping" and work.stages > MOST_STAGES:
        return f"stages do not overlap on CPUs: only up to K = {MOST_STAGES}"
    return None


class TorchGPipe:
    """The whole pipeline on rank 0; the other workers do nothing."""

    def __init__(self, context: BenchContext, checkpoint: str) -> None:
        """``checkpoint`` is torchgpipe's: always, except_last, never."""
        self._cells: list[Cell] = []
        if context.coord.rank:
            return
        from torchgpipe import GPipe

        layers, loss = context.work.build()
        stages = context.coord.stages
        self._cells = [Cell(layers, cell) for cell in cell_ranges(context.cells[stages], len(layers))]
        self._model: Any = GPipe(
            nn.Sequential(*self._cells),
            balance=[1] * stages,
            devices=["cpu"] * stages,
            chunks=context.work.micro_batches,
            checkpoint=checkpoint,
        )
        self._inputs: Any = context.inputs[0] if len(context.inputs) == 1 else context.inputs
        self._targets, self._objective = context.targets, context.objective(loss)

    def step(self) -> None:
        """Forward and backward of the mini-batch; the loss is of the gathered outputs, as its users write it."""
        if self._cells:
            with torch.enable_grad():
                torch.autograd.backward(self._objective(self._model(self._inputs), self._targets))

    def gradients(self) -> Gradients:
        """All of them, on rank 0."""
        return {key: value for cell in self._cells for key, value in cell.gradients().items()}

    def clear(self) -> None:
        """Drops them."""
        for cell in self._cells:
            cell.clear()
