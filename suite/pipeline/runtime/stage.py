"""A stage: its cells of consecutive layers on one device, and the tensors it saves of each micro-batch in flight.

A stage has one cell, or several with ``interleaved``, ``zero_bubble`` and the V-shaped schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from suite.device import MULTIPLIES_BF16_INTO_FP32, unfused
from suite.pipeline.model.batchnorm import RunningStats, by_micro_batch
from suite.pipeline.model.changing_buffers import ChangingBuffers, Values, copies_of_buffers, replaced
from suite.pipeline.model.layers import Tensors, as_tuple, loss_of, materialize
from suite.pipeline.model.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.runtime.boundary import CutSpec, cast_to_boundary
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import CellBoundary, call, pops_of
from suite.pipeline.runtime.weight_grad import DeferredGrads, WeightGradStore, with_deferrable_linears


@dataclass
class CellMicroBatch:
    """One micro-batch in one cell, and what is saved of it between its forward and its backward.

    After a forward without graph that is only ``inputs``; with a graph also ``output_edges``, where the backward
    starts: one for each boundary tensor with ``needs_gradient``, None if autograd has none for it. The outputs
    themselves can be freed once they are sent.
    """

    inputs: Tensors
    input_boundary: CellBoundary
    output_boundary: CellBoundary | None
    """None in the last cell, which ends with the loss."""
    step: int = 0
    index: int = 0
    """The micro-batch's number in the whole mini-batch, for the seeds."""
    virtual_stage: int = 0
    splits_backward: bool = True
    """Whether its backward may defer weight gradients."""
    output_edges: tuple[GradientEdge | None, ...] | None = None
    buffers: Values = field(default_factory=list)
    """What the buffers that its forward without graph changed were before it."""


class Stage:
    """Computes cells: forward with or without a graph, and backward through a saved or recomputed graph."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        cells: Sequence[range],
        loss: nn.Module | None,
        device: torch.device,
        precision: str,
        seed: int,
        defers_weight_grads: bool = False,
    ) -> None:
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
        self.by_index: dict[int, nn.Module] = dict(zip(self.indices, self.layers, strict=True))
        """Its layers by their index in the model."""
        self.types = {index: type(layers[index]).__name__ for index in self.indices}
        """The type of each layer, as its author wrote it."""
        self.running_stats = RunningStats(self.layers)
        self.loss = loss.to(device) if loss is not None else None
        self._mixed = precision == "bf16"
        self._cells = [nn.ModuleList(self.by_index[index] for index in cell) for cell in cells]
        self._buffers = [ChangingBuffers(cell) for cell in self._cells]
        self._shapes = [ShapeInference([layers[index] for index in cell], self._mixed) for cell in cells]
        self._mode: bool | None = None
        self.current_layer: int | None = None
        """The layer whose forward runs now; error and stall reports name it."""
        self.micro_batch = 0
        """The micro-batch, counted over the whole mini-batch, of the last forward."""
        self.defers_weight_grads = defers_weight_grads
        self._adds_in_product = self._mixed and device.type in MULTIPLIES_BF16_INTO_FP32
        splits = defers_weight_grads or self._adds_in_product
        self._weight_grads = [WeightGradStore(with_deferrable_linears(cell)) for cell in self._cells] if splits else []

    @contextmanager
    def weights_cast_once(self) -> Iterator[None]:
        """A context for one mini-batch, in which bf16 casts each weight once. Parameters must not change inside.

            outside   F0 cast, product   R0 cast, product   R1 cast, product   each graph holds a copy of its own
            inside    F0 cast, product   R0       product   R1       product   all share one

        Gradients pass through the one cast in bf16, and are summed over micro-batches in fp32. Autocast keeps a copy
        until its outermost context ends; the one here casts nothing itself. If another thread ends one meanwhile,
        weights are cast again.
        """
        if not self._mixed:
            yield
            return
        for store in self._weight_grads:
            store.keep_casts(True)
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            for store in self._weight_grads:
                store.keep_casts(False)

    def train(self, mode: bool) -> None:
        """Switches all modules to training or evaluation mode, which takes long, unless the last call did."""
        if mode == self._mode:
            return
        self._mode = mode
        self.layers.train(mode)
        if self.loss is not None:
            self.loss.train(mode)

    def parameters(self, virtual_stage: int) -> Iterator[nn.Parameter]:
        """Returns the parameters of one cell, in the order of its layers."""
        return self._cells[virtual_stage].parameters()

    @torch.no_grad()
    def evaluate_layer(self, index: int, inputs: Tensors, buffers: Values) -> Tensor:
        """Returns the first tensor that a layer makes of its inputs in evaluation mode, in fp32, with these buffers in
        place of its own."""
        layer = self.by_index[index]
        layer.eval()
        try:
            with replaced(buffers), unfused():  # a compiler would take seconds for kernels in fp32
                copies = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone() for tensor in inputs)
                return as_tuple(layer(*copies))[0]
        finally:
            layer.train()

    def named_parameters(self) -> dict[tuple[int, str], nn.Parameter]:
        """Returns all parameters by (layer, name), cell by cell."""
        return {
            (index, name): parameter
            for index, layer in self.by_index.items()
            for name, parameter in layer.named_parameters()
        }

    def infer_output(self, cut: CutSpec, virtual_stage: int = 0) -> CutSpec:
        """Returns the cut behind a cell whose input cut is ``cut``."""
        return self._shapes[virtual_stage].infer_all(cut)[-1]

    def forward(self, micro_batch: CellMicroBatch, targets: Tensors = ()) -> tuple[Tensors, Tensor | None]:
        """Runs a cell; only the last one needs ``targets``.

        Returns the output boundary's tensors and None; from the last cell the objective as a 1-tuple and the metric.
        """
        if not self.layers.training:
            return self._forward(micro_batch, targets)
        buffers = self._buffers[micro_batch.virtual_stage]
        with buffers.left_to_graph() if torch.is_grad_enabled() else buffers.recorded(micro_batch.buffers):
            return self._forward(micro_batch, targets)

    def _forward(self, micro_batch: CellMicroBatch, targets: Tensors) -> tuple[Tensors, Tensor | None]:
        cell, output_boundary = self.cells[micro_batch.virtual_stage], micro_batch.output_boundary
        tensors, stash = micro_batch.input_boundary.unpack(micro_batch.inputs)
        self.micro_batch = micro_batch.index
        self.running_stats.begin(micro_batch.index)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._mixed):
            for index, layer in zip(cell, self._cells[micro_batch.virtual_stage], strict=True):
                self.current_layer = index
                set_seed(layer_seed(self.seed, micro_batch.step, micro_batch.index, index), self.device)
                if output_boundary is None and index == cell[-1]:
                    assert self.loss is not None
                    popped = tuple(stash.pop(name) for name in pops_of(layer))
                    objective, metric = loss_of(layer, self.loss, (*tensors, *popped), targets)
                    self.current_layer = None
                    return (objective,), metric.detach()
                tensors = call(layer, tensors, stash, bf16=self._mixed)
        self.current_layer = None
        assert output_boundary is not None
        return output_boundary.pack(tensors, stash), None

    def forward_with_graph(self, micro_batch: CellMicroBatch, targets: Tensors = ()) -> tuple[Tensors, Tensor | None]:
        """Runs a cell with a graph, from leaf inputs, and saves the edges where its backward starts.

        A first forward with graph and a recompute both use this, so they are bit-identical.
        """
        micro_batch.inputs = tuple(
            tensor.detach().requires_grad_() if spec.needs_gradient else tensor
            for tensor, spec in zip(micro_batch.inputs, micro_batch.input_boundary.tensors, strict=True)
        )
        self._split_products(micro_batch)
        with torch.enable_grad(), replaced(micro_batch.buffers):
            outputs, metric = self.forward(micro_batch, targets)
            differentiable = outputs
            if micro_batch.output_boundary is not None:
                specs = micro_batch.output_boundary.tensors
                outputs = cast_to_boundary(outputs, specs)
                differentiable = tuple(t for t, spec in zip(outputs, specs, strict=True) if spec.needs_gradient)
        micro_batch.output_edges = tuple(get_gradient_edge(t) if t.requires_grad else None for t in differentiable)
        return outputs, metric

    def backward(self, micro_batch: CellMicroBatch, gradients: Tensors) -> Tensors:
        """Adds this micro-batch's gradients to the parameters'; returns the gradients of the inputs that need one.

        An input without influence on the outputs gets zeros: the previous stage still waits for its gradient.
        """
        edges = micro_batch.output_edges
        assert edges is not None, "backward before forward"
        live = [(edge, grad) for edge, grad in zip(edges, gradients, strict=True) if edge is not None]
        if live:
            self._split_products(micro_batch)  # a layer may recompute in its backward
            self.running_stats.begin(micro_batch.index)
            adds = self._adds_in_product
            with self._weight_grads[micro_batch.virtual_stage].adding_to_grad() if adds else nullcontext():
                torch.autograd.backward([edge for edge, _ in live], [grad for _, grad in live])
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor, spec in zip(micro_batch.inputs, micro_batch.input_boundary.tensors, strict=True)
            if spec.needs_gradient
        )

    def _split_products(self, micro_batch: CellMicroBatch) -> None:
        if self._weight_grads:
            self._weight_grads[micro_batch.virtual_stage].split_products(micro_batch.splits_backward)

    def warm_up(self, micro_batch: CellMicroBatch, targets: Tensors, train: bool) -> None:
        """Runs a cell's forward, and to train its backwards, whole and deferred, so that the device has loaded the
        kernels. There are two of them, because the second gradient is added to the first.

        Parameters, gradients and buffers are as before, Python attributes that a layer sets itself are not. The
        micro-batch must be one that runs later, which then overwrites its BatchNorm statistics.
        """
        boundary = micro_batch.output_boundary
        wanted = [spec.needs_gradient for spec in boundary.tensors] if boundary is not None else [True]
        with replaced(copies_of_buffers(self.layers)):
            with torch.no_grad():
                self.forward(micro_batch, targets)
            for deferred in (False, self.defers_weight_grads) if train else ():
                micro_batch.splits_backward = deferred
                outputs, _ = self.forward_with_graph(micro_batch, targets)
                gradients = tuple(torch.zeros_like(t) for t, needed in zip(outputs, wanted, strict=True) if needed)
                if deferred:
                    _, weight_grads = self.backward_input(micro_batch, gradients)
                    list(self.backward_weight(weight_grads, micro_batch.virtual_stage))
                else:
                    self.backward(micro_batch, gradients)
        if train:
            for parameter in self.layers.parameters():
                parameter.grad = None

    def backward_input(self, micro_batch: CellMicroBatch, gradients: Tensors) -> tuple[Tensors, DeferredGrads]:
        """As ``backward``, but defers weight gradients; also returns the calls that add them."""
        returned: list[Tensors] = []
        deferred = self._weight_grads[micro_batch.virtual_stage].run_deferred(
            lambda: returned.append(self.backward(micro_batch, gradients))
        )
        return returned[0], deferred

    def backward_weight(self, deferred: DeferredGrads, virtual_stage: int = 0) -> Iterator[nn.Parameter]:
        """Adds deferred gradients while the caller iterates; yields each parameter once its gradient is complete."""
        return self._weight_grads[virtual_stage].apply(deferred)
