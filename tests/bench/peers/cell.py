"""Consecutive layers as one module, which is what most peers take as a stage; and all of them in one process, without a
pipeline: the reference for time and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from suite.pipeline.model.layers import Tensors, as_tuple, materialize
from suite.pipeline.model.rng import initial_seed
from tests.bench.peers.peer import BenchContext, Gradients
from tests.bench.peers.workload import SEED, BenchWorkload


class Cell(nn.Module):
    """Consecutive layers of a model, with the same initial values as in the suite's stages."""

    def __init__(self, layers: Sequence[nn.Module], indices: range, recompute: bool = False) -> None:
        """``layers`` are the whole model's, on the meta device. With ``recompute``, only the inputs are saved."""
        super().__init__()
        self.indices, self.recompute = indices, recompute
        cpu = torch.device("cpu")
        self.layers = nn.ModuleList(materialize(layers[index], initial_seed(SEED, index), cpu) for index in indices)

    def forward(self, *tensors: Any) -> Tensor | Tensors:
        """Takes the outputs of the previous layer, as several arguments or as one tuple."""
        if len(tensors) == 1:
            tensors = as_tuple(tensors[0])
        if self.recompute and torch.is_grad_enabled():
            # no layer here draws random numbers, so the generator state need not be saved
            result: Tensor | Tensors = checkpoint(self._run, *tensors, use_reentrant=False, preserve_rng_state=False)
            return result
        return self._run(*tensors)

    def _run(self, *tensors: Tensor) -> Tensor | Tensors:
        for layer in self.layers:
            tensors = as_tuple(layer(*tensors))
        return tensors[0] if len(tensors) == 1 else tensors

    def gradients(self) -> Gradients:
        """Returns the gradients by (layer, name); zeros for a parameter that the loss does not depend on."""
        return {
            (index, name): torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for index, layer in zip(self.indices, self.layers, strict=True)
            for name, parameter in layer.named_parameters()
        }


class CellRunner:
    """The common part of peers that train cells: this worker's gradients are those of its cells."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = cells

    def gradients(self) -> Gradients:
        return {key: value for cell in self.cells for key, value in cell.gradients().items()}

    def clear(self) -> None:
        for cell in self.cells:
            cell.zero_grad()


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
