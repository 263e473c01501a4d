"""torchgpipe 0.0.5 (an extra of this project): one process, its partitions on the device ``cpu``.

It was made for GPUs, whose kernels run asynchronously. On CPUs all partitions share one worker thread, and autograd's
backward has one CPU thread too. Nothing overlaps, so its row checks gradients more than speed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from experiments.benchmark.peers.cell import Cell, CellRunner
from experiments.benchmark.peers.peer import BenchContext
from experiments.benchmark.peers.workload import BenchWorkload
from suite.pipeline.planning.partition import cell_ranges

MAX_STAGES = 4


def torchgpipe_refusal(work: BenchWorkload, checkpoint: str) -> str | None:
    """Returns why it cannot or should not run a workload, or None."""
    if importlib.util.find_spec("torchgpipe") is None:
        return "torchgpipe is not installed: pip install 'gpipe-suite[peers]'"
    if work.name == "translation" and checkpoint != "never":
        return "its recomputing backward needs a gradient for every tensor between stages, and ids have none"
    if work.replicas > 1:
        return "one process: no replicas"
    if work.name == "sleeping" and work.stages > MAX_STAGES:
        return f"stages do not overlap on CPUs: only up to K = {MAX_STAGES}"
    return None


class TorchGPipe(CellRunner):
    """Runs the whole pipeline on rank 0; the other workers do nothing."""

    def __init__(self, context: BenchContext, checkpoint: str) -> None:
        """``checkpoint`` is torchgpipe's: always, except_last, never."""
        super().__init__([])
        if context.coord.rank:
            return
        from torchgpipe import GPipe

        layers, loss = context.work.build()
        stages = context.coord.stages
        self.cells = [Cell(layers, cell) for cell in cell_ranges(context.cells[stages], len(layers))]
        self._model: Any = GPipe(
            nn.Sequential(*self.cells),
            balance=[1] * stages,
            devices=["cpu"] * stages,
            chunks=context.work.micro_batches,
            checkpoint=checkpoint,
        )
        self._inputs: Any = context.inputs[0] if len(context.inputs) == 1 else context.inputs
        self._targets, self._objective = context.targets, context.objective(loss)

    def step(self) -> None:
        """Runs forward and backward of the mini-batch; the loss takes the gathered outputs."""
        if self.cells:
            with torch.enable_grad():
                torch.autograd.backward(self._objective(self._model(self._inputs), self._targets))
