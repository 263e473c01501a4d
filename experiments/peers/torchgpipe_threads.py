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

from experiments.peers.cell import Cell
from experiments.peers.peer import Gradients, Seat
from experiments.peers.work import Work
from suite.pipeline.partition import cell_ranges

MOST_STAGES = 4


def refusal(work: Work, checkpoint: str) -> str | None:
    """Returns why it cannot or should not run a work."""
    if importlib.util.find_spec("torchgpipe") is None:
        return "torchgpipe is not installed: pip install 'gpipe-suite[peers]'"
    if work.name == "translation" and checkpoint != "never":
        return "its rebuilt backward needs a gradient for every tensor between stages, and ids and masks have none"
    if work.replicas > 1:
        return "one process: no replicas"
    if work.name == "sleeping" and work.stages > MOST_STAGES:
        return f"stages do not overlap on CPUs: only up to K = {MOST_STAGES}"
    return None


class TorchGPipe:
    """The whole pipeline on rank 0; the other workers do nothing."""

    def __init__(self, seat: Seat, checkpoint: str) -> None:
        """``checkpoint`` is torchgpipe's: always, except_last, never."""
        self._cells: list[Cell] = []
        if seat.place.rank:
            return
        from torchgpipe import GPipe

        layers, loss = seat.work.build()
        stages = seat.place.stages
        self._cells = [Cell(layers, cell) for cell in cell_ranges(seat.cells[stages], len(layers))]
        self._model: Any = GPipe(
            nn.Sequential(*self._cells),
            balance=[1] * stages,
            devices=["cpu"] * stages,
            chunks=seat.work.micro_batches,
            checkpoint=checkpoint,
        )
        self._inputs: Any = seat.inputs[0] if len(seat.inputs) == 1 else seat.inputs
        self._targets, self._objective = seat.targets, seat.objective(loss)

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
