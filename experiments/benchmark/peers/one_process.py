"""One process with the whole model and no pipeline: the reference for time and gradients."""

from __future__ import annotations

import torch

from experiments.benchmark.peers.cell import Cell, CellRunner
from experiments.benchmark.peers.peer import BenchContext
from experiments.benchmark.peers.workload import BenchWorkload


class WholeModel(CellRunner):
    """All layers in one module, differentiated by plain autograd."""

    def __init__(self, work: BenchWorkload) -> None:
        layers, self._loss = work.build()
        super().__init__([Cell(layers, range(len(layers)))])
        self._batches = [work.split(*work.share(replica), replica) for replica in range(work.replicas)]

    def step(self) -> None:
        for batch in self._batches:
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                objective, _ = self._loss(self.cells[0](*inputs), *targets)
                (objective / batch.divisor).backward()


class OneProcess(CellRunner):
    """Trains the whole model on rank 0; the other workers do nothing."""

    def __init__(self, context: BenchContext, threads: int = 1) -> None:
        """With ``threads`` = 0, rank 0 uses as many threads as there are workers."""
        self._threads = threads or context.coord.stages * context.coord.replicas
        self._model = WholeModel(context.work) if context.coord.rank == 0 else None
        super().__init__(self._model.cells if self._model is not None else [])

    def step(self) -> None:
        if self._model is None:
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._model.step()
        torch.set_num_threads(before)
