"""torch.distributed.pipelining: GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedules of PyTorch itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from experiments.benchmark.peers.cell import Cell
from experiments.benchmark.peers.peer import BenchContext, Gradients, mean_over_replicas
from experiments.benchmark.peers.work import Work
from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.planning.partition import cell_ranges


def refuse_split(work: Work) -> str | None:
    """Returns why a schedule that splits the backward cannot run a work."""
    if work.name == "translation":
        return (
            "PyTorch's split backward (2.13) loses the gradient of the target's embedding, which no input of its stage "
            "passes by, or fails on a graph that layers of two differentiable inputs share"
        )
    return None


class TorchPipelining:
    """A schedule of PyTorch's, over its ``PipelineStage``."""

    def __init__(
        self, context: BenchContext, schedule: str, recompute: bool = False, parts: int = 1, v_shaped: bool = False
    ) -> None:
        """``parts`` stages a process: process k has k, K + k, ..., or ``v_shaped`` k and 2K - 1 - k."""
        self._context = context
        layers, loss = context.work.build()
        stages, k = context.coord.stages, context.coord.stage
        count = parts * stages
        mine = [k, count - 1 - k] if v_shaped else list(range(k, count, stages))
        cells = cell_ranges(context.cells[count], len(layers))
        self._cells = [Cell(layers, cells[index], recompute) for index in mine]
        device, group = torch.device("cpu"), context.groups.stages
        fronts = _fronts(context, layers)
        built = [
            PipelineStage(
                cell, index, count, device, fronts[cells[index].start], fronts[cells[index].stop], group=group
            )
            for cell, index in zip(self._cells, mine, strict=True)
        ]
        self._arguments = context.inputs if 0 in mine else ()
        self._target = context.targets if count - 1 in mine else None
        # the objective is divided already, so the schedule must not divide the gradients again
        self._schedule = get_schedule_class(schedule)(
            built[0] if parts == 1 else built,
            context.work.micro_batches,
            loss_fn=context.objective(loss),
            scale_grads=False,
        )

    def step(self) -> None:
        """One step of the schedule, then one all-reduce over replicas."""
        self._schedule.step(*self._arguments, target=self._target, return_outputs=False)
        mean_over_replicas(self._context, self.gradients())

    def gradients(self) -> Gradients:
        """Of this process's stages."""
        return {key: value for cell in self._cells for key, value in cell.gradients().items()}

    def clear(self) -> None:
        """Drops them."""
        for cell in self._cells:
            cell.clear()


def _fronts(context: BenchContext, layers: Sequence[nn.Module]) -> list[Tensors]:
    """Returns meta-device tensors like those before each layer and behind the last.

    Without them a stage finds out by running on memory as it lies about, and ids read from there are out of range.
    """
    each = context.work.rows_each
    tensors: Tensors = tuple(torch.empty_like(tensor[:each], device="meta") for tensor in context.inputs)
    fronts = [tensors]
    for layer in layers:
        tensors = as_tuple(layer(*tensors))
        fronts.append(tensors)
    return fronts
