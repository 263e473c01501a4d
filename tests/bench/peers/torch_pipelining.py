"""torch.distributed.pipelining: GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedules of PyTorch itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.planning.partition import cell_ranges
from tests.bench.peers.cell import Cell, CellRunner
from tests.bench.peers.peer import BenchContext, sum_over_replicas

REFUSED_BY_SPLIT_BACKWARD = {
    "translation": "PyTorch's split backward (2.13) loses the gradient of the target's embedding, which is not on the "
    "path of any input of its stage, or fails on a graph that layers with two differentiable inputs share"
}


class TorchPipelining(CellRunner):
    """One of PyTorch's schedules, over its ``PipelineStage``."""

    def __init__(self, context: BenchContext, schedule: str, recompute: bool, virtual_stages: int) -> None:
        """Process k has ``virtual_stages`` stages: k, K + k, ..., or for ZBV k and 2K - 1 - k."""
        self._context = context
        layers, loss = context.work.build()
        stages, k = context.coord.stages, context.coord.stage
        count = virtual_stages * stages
        own_stages = [k, count - 1 - k] if schedule == "ZBVZeroBubble" else list(range(k, count, stages))
        cells = cell_ranges(context.cells[count], len(layers))
        super().__init__([Cell(layers, cells[index], recompute) for index in own_stages])
        device, group = torch.device("cpu"), context.groups.pipeline
        specs = _boundary_specs(context, layers)
        pipeline_stages = [
            PipelineStage(cell, index, count, device, specs[cells[index].start], specs[cells[index].stop], group=group)
            for cell, index in zip(self.cells, own_stages, strict=True)
        ]
        self._inputs = context.inputs if 0 in own_stages else ()
        self._target = context.targets if count - 1 in own_stages else None
        # the objective is already divided, so the schedule must not divide the gradients again
        self._schedule = get_schedule_class(schedule)(
            pipeline_stages[0] if virtual_stages == 1 else pipeline_stages,
            context.work.micro_batches,
            loss_fn=context.objective(loss),
            scale_grads=False,
        )

    def step(self) -> None:
        self._schedule.step(*self._inputs, target=self._target, return_outputs=False)
        sum_over_replicas(self._context, self.gradients())


def _boundary_specs(context: BenchContext, layers: Sequence[nn.Module]) -> list[Tensors]:
    """Returns meta-device tensors like the inputs of each layer, and like the outputs of the last.

    Without them a stage infers its shapes by running on uninitialized memory, where ids are out of range.
    """
    rows = context.work.shape[0]
    tensors: Tensors = tuple(torch.empty_like(tensor[:rows], device="meta") for tensor in context.inputs)
    specs = [tensors]
    for layer in layers:
        tensors = as_tuple(layer(*tensors))
        specs.append(tensors)
    return specs
