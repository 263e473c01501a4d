"""A stage: one cell of consecutive layers on one device, and what it keeps of each micro-batch in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from suite.pipeline.batchnorm import MovingAverages, by_micro_batch
from suite.pipeline.boundary import Front, announced
from suite.pipeline.fronts import Fronts
from suite.pipeline.layers import Tensors, materialise
from suite.pipeline.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.skip import Cargo, call


@dataclass
class Kept:
    """What a stage holds of a micro-batch between its forward and its backward.

    After a forward without graph only ``inputs``; with a graph ``outputs`` too: the boundary tensors that carry
    gradients or, on the last stage, the objective alone.
    """

    inputs: Tensors
    outputs: Tensors | None = None


class Stage:
    """Computes one cell: forward with or without a graph, and backward through a graph it kept or rebuilt."""

    def __init__(
        self, layers: Sequence[nn.Module], indices: range, loss: nn.Module | None,
        device: torch.device, precision: str, seed: int,
    ) -> None:  # fmt: skip
        """Makes this cell's layers, and only these, from the whole model's list of meta-device ``layers``.

        ``loss`` is given to the last stage only. ``precision`` bf16 computes under autocast: parameters, gradients and
        their sums stay fp32, as matrix products on a TPU take bf16 factors of fp32 tensors.
        """
        self.indices, self.device, self.seed = indices, device, seed
        mine = [layers[index] for index in indices]
        self.layers = nn.ModuleList(
            by_micro_batch(materialise(layer, initial_seed(seed, index), device))
            for index, layer in zip(indices, mine, strict=True)
        )
        self.averages = MovingAverages(self.layers)
        self.loss = loss.to(device) if loss is not None else None
        self._mixed = precision == "bf16"
        self._fronts = Fronts(mine)

    def train(self, mode: bool) -> None:
        """Switches dropout and the like on or off in all layers."""
        self.layers.train(mode)
        if self.loss is not None:
            self.loss.train(mode)

    def leaving(self, front: Front) -> Front:
        """Returns the front behind the cell when ``front`` is before it."""
        return self._fronts.behind(front)

    def forward(
        self, inputs: Tensors, arriving: Cargo, leaving: Cargo | None, targets: Tensors, step: int, micro_batch: int
    ) -> tuple[Tensors, Tensor | None]:
        """Runs the cell on one micro-batch; ``micro_batch`` counts over the whole mini-batch, for the seeds.

        Returns what leaves the cell, or on the last stage, where ``leaving`` is None, the objective as a 1-tuple and
        the measure.
        """
        tensors, stash = arriving.unpack(inputs)
        self.averages.begin(micro_batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._mixed):
            for index, layer in zip(self.indices, self.layers, strict=True):
                set_seed(layer_seed(self.seed, step, micro_batch, index), self.device)
                tensors = call(layer, tensors, stash)
            if self.loss is not None:
                objective, measure = self.loss(*tensors, *targets)
                return (objective,), measure.detach()
        return tensors if leaving is None else leaving.pack(tensors, stash), None

    def graph(
        self, kept: Kept, arriving: Cargo, leaving: Cargo | None, targets: Tensors, step: int, micro_batch: int
    ) -> tuple[Tensors, Tensor | None]:
        """Runs the cell so that a backward can follow: from leaf inputs, the outputs that carry gradients kept.

        The same code makes a first forward with graph and a rebuild, so both are equal to the bit.
        """
        kept.inputs = tuple(
            tensor.detach().requires_grad_() if spec.needs_gradient else tensor
            for tensor, spec in zip(kept.inputs, arriving.boundary, strict=True)
        )
        with torch.enable_grad():
            outputs, measure = self.forward(kept.inputs, arriving, leaving, targets, step, micro_batch)
            if leaving is not None:
                outputs = announced(outputs, leaving.boundary)
        differentiable = (
            outputs
            if leaving is None
            else tuple(tensor for tensor, spec in zip(outputs, leaving.boundary, strict=True) if spec.needs_gradient)
        )
        kept.outputs = differentiable
        return outputs, measure

    def backward(self, kept: Kept, gradients: Tensors, arriving: Cargo) -> Tensors:
        """Adds this micro-batch's gradients to the parameters'; returns those of the inputs that carry one.

        An input that took no part in the result gets zeros: the stage before waits for a gradient all the same.
        """
        assert kept.outputs is not None, "backward before forward"
        live = [(out, grad) for out, grad in zip(kept.outputs, gradients, strict=True) if out.requires_grad]
        if live:
            torch.autograd.backward([out for out, _ in live], [grad for _, grad in live])
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor, spec in zip(kept.inputs, arriving.boundary, strict=True)
            if spec.needs_gradient
        )
