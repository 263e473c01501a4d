"""One process with the whole model and no pipeline: the reference for time and gradients."""

from __future__ import annotations

import torch

from experiments.benchmark.peers.cell import Cell
from experiments.benchmark.peers.peer import BenchContext, Gradients
from experiments.benchmark.peers.work import Work
from suite.pipeline.model.microbatch import MiniBatch


class OneProcess:
    """Runs micro-batch after micro-batch on rank 0; the other workers do nothing."""

    def __init__(self, context: BenchContext, threads: int = 1) -> None:
        """With ``threads`` = 0 it uses one thread per worker; the other workers are idle."""
        self._threads = threads or context.coord.stages * context.coord.replicas
        self._whole = WholeModel(context.work) if context.coord.rank == 0 else None

    def step(self) -> None:
        """Runs the whole mini-batch of all replicas."""
        if self._whole is None:
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._whole.step()
        torch.set_num_threads(before)

    def gradients(self) -> Gradients:
        """All of them, on rank 0."""
        return self._whole.cell.gradients() if self._whole is not None else {}

    def clear(self) -> None:
        """Drops them."""
        if self._whole is not None:
            self._whole.cell.clear()


class WholeModel:
    """All layers in one module, differentiated by plain autograd."""

    def __init__(self, work: Work) -> None:
        layers, self._loss = work.build()
        self.cell = Cell(layers, range(len(layers)))
        self._batches: list[MiniBatch] = [work.mini_batch(replica) for replica in range(work.replicas)]

    def step(self) -> None:
        """Adds up the gradients of the mean loss over all micro-batches."""
        for batch in self._batches:
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                objective, _ = self._loss(self.cell(*inputs), *targets)
                (objective / batch.weight).backward()
