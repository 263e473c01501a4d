"""A stage: its cells of consecutive layers on one device, and the tensors it saves of each micro-batch in flight.

Most schedules give a stage one cell; an interleaved one gives it several that are far apart in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from suite.pipeline.model.batchnorm import RunningStats, by_micro_batch
from suite.pipeline.model.layers import Tensors, loss_of, materialize
from suite.pipeline.model.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.runtime.boundary import CutSpec, cast_to_boundary
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import CellBoundary, call, pops_of
from suite.pipeline.runtime.weight_grad import DeferredGrads, WeightGradStore, with_deferrable_linears


@dataclass
class SavedMicroBatch:
    """What a stage saves of a micro-batch between its forward and its backward.

    After a forward without graph only ``inputs``; with a graph also ``output_edges``, where the backward starts: one
    for each boundary tensor with ``needs_gradient``, None if autograd has none for it. The outputs themselves can be
    freed once they are sent.
    """

    inputs: Tensors
    output_edges: tuple[GradientEdge | None, ...] | None = None


class Stage:
    """Computes cells: forward with or without a graph, and backward through a saved or recomputed graph."""

    def __init__(
        self, layers: Sequence[nn.Module], cells: Sequence[range], loss: nn.Module | None,
        device: torch.device, precision: str, seed: int, defers_weight_grads: bool = False,
    ) -> None:  # fmt: skip
        """Materializes only the layers of its ``cells`` from ``layers``, the whole model on the meta device.

        Only the last stage gets ``loss``. ``precision`` bf16 computes under autocast: parameters, gradients and their
        sums stay fp32, as matrix products on a TPU take bf16 factors of fp32 tensors; tensors between layers are bf16.
        With ``defers_weight_grads`` weight gradients can be deferred.
        """
        self.cells, self.device, self.seed = tuple(cells), device, seed
        self.indices = tuple(index for cell in cells for index in cell)
        """Indices of all its layers, cell by cell."""
        self.layers = nn.ModuleList(
            by_micro_batch(materialize(layers[index], initial_seed(seed, index), device)) for index in self.indices
        )
        self.running_stats = RunningStats(self.layers)
        self.loss = loss.to(device) if loss is not None else None
        self._mixed = precision == "bf16"
        layer_iterator = iter(self.layers)
        self._cells = [nn.ModuleList(next(layer_iterator) for _ in cell) for cell in cells]
        self._shapes = [ShapeInference([layers[index] for index in cell], self._mixed) for cell in cells]
        self.current_layer: int | None = None
        """The layer whose forward runs now; error and stall reports name it."""
        self.defers_weight_grads = defers_weight_grads
        self._weight_grads = (
            [WeightGradStore(with_deferrable_linears(cell)) for cell in self._cells] if defers_weight_grads else []
        )

    def train(self, mode: bool) -> None:
        """Switches all layers to training or evaluation mode."""
        self.layers.train(mode)
        if self.loss is not None:
            self.loss.train(mode)

    def parameters(self, virtual_stage: int) -> Iterator[nn.Parameter]:
        """Returns the parameters of one cell, in the order of its layers."""
        return self._cells[virtual_stage].parameters()

    def infer_output(self, cut: CutSpec, virtual_stage: int = 0) -> CutSpec:
        """Returns the cut behind a cell whose input cut is ``cut``."""
        return self._shapes[virtual_stage].infer_output(cut)

    def forward(
        self,
        inputs: Tensors,
        input_boundary: CellBoundary,
        output_boundary: CellBoundary | None,
        targets: Tensors,
        step: int,
        micro_batch: int,
        virtual_stage: int = 0,
    ) -> tuple[Tensors, Tensor | None]:
        """Runs a cell on one micro-batch; ``micro_batch`` counts over the whole mini-batch, for the seeds.

        Returns the output boundary's tensors and None; from the last cell, where ``output_boundary`` is None, the
        objective as a 1-tuple and the metric.
        """
        tensors, stash = input_boundary.unpack(inputs)
        self.running_stats.begin(micro_batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._mixed):
            for index, layer in zip(self.cells[virtual_stage], self._cells[virtual_stage], strict=True):
                self.current_layer = index
                set_seed(layer_seed(self.seed, step, micro_batch, index), self.device)
                if output_boundary is None and index == self.cells[virtual_stage][-1]:
                    assert self.loss is not None
                    popped = tuple(stash.pop(name) for name in pops_of(layer))
                    objective, metric = loss_of(layer, self.loss, (*tensors, *popped), targets)
                    self.current_layer = None
                    return (objective,), metric.detach()
                tensors = call(layer, tensors, stash, narrow=self._mixed)
        self.current_layer = None
        assert output_boundary is not None
        return output_boundary.pack(tensors, stash), None

    def forward_with_graph(
        self,
        saved: SavedMicroBatch,
        input_boundary: CellBoundary,
        output_boundary: CellBoundary | None,
        targets: Tensors,
        step: int,
        micro_batch: int,
        virtual_stage: int = 0,
    ) -> tuple[Tensors, Tensor | None]:
        """Runs a cell with a graph, from leaf inputs, and saves the edges where its backward starts.

        A first forward with graph and a recompute both use this, so they are bit-identical.
        """
        saved.inputs = tuple(
            tensor.detach().requires_grad_() if spec.needs_gradient else tensor
            for tensor, spec in zip(saved.inputs, input_boundary.tensors, strict=True)
        )
        with torch.enable_grad():
            outputs, metric = self.forward(
                saved.inputs, input_boundary, output_boundary, targets, step, micro_batch, virtual_stage
            )
            if output_boundary is not None:
                outputs = cast_to_boundary(outputs, output_boundary.tensors)
        differentiable = (
            outputs
            if output_boundary is None
            else tuple(
                tensor for tensor, spec in zip(outputs, output_boundary.tensors, strict=True) if spec.needs_gradient
            )
        )
        saved.output_edges = tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in differentiable
        )
        return outputs, metric

    def backward(self, saved: SavedMicroBatch, gradients: Tensors, input_boundary: CellBoundary) -> Tensors:
        """Adds this micro-batch's gradients to the parameters'; returns the gradients of the inputs that need one.

        An input without influence on the outputs gets zeros: the previous stage still waits for its gradient.
        """
        assert saved.output_edges is not None, "backward before forward"
        live = [(edge, grad) for edge, grad in zip(saved.output_edges, gradients, strict=True) if edge is not None]
        if live:
            torch.autograd.backward([edge for edge, _ in live], [grad for _, grad in live])
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor, spec in zip(saved.inputs, input_boundary.tensors, strict=True)
            if spec.needs_gradient
        )

    def backward_input(
        self, saved: SavedMicroBatch, gradients: Tensors, input_boundary: CellBoundary, virtual_stage: int = 0
    ) -> tuple[Tensors, DeferredGrads]:
        """As ``backward``, but defers weight gradients; also returns the calls that add them."""
        returned: list[Tensors] = []
        deferred = self._weight_grads[virtual_stage].run_deferred(
            lambda: returned.append(self.backward(saved, gradients, input_boundary))
        )
        return returned[0], deferred

    def backward_weight(self, deferred: DeferredGrads, virtual_stage: int = 0) -> Iterator[nn.Parameter]:
        """Adds deferred gradients while the caller iterates; yields each parameter once its gradient is complete."""
        return self._weight_grads[virtual_stage].apply(deferred)
