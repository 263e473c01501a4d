"""A stage: its cells of consecutive layers on one device, and what it keeps of each micro-batch in flight.

Most schedules give a stage one cell; an interleaved one gives it several, far from each other in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from suite.pipeline.batchnorm import MovingAverages, by_micro_batch
from suite.pipeline.boundary import Front, announced
from suite.pipeline.fronts import Fronts
from suite.pipeline.layers import Tensors, materialise, scored
from suite.pipeline.put_off import Later, Splits, splitting
from suite.pipeline.rng import initial_seed, layer_seed, set_seed
from suite.pipeline.skip import Cargo, call, takes_of


@dataclass
class Kept:
    """What a stage holds of a micro-batch between its forward and its backward.

    After a forward without graph only ``inputs``; with a graph ``roots`` too: where the backward begins, one for each
    boundary tensor that carries a gradient, None for one that this cell gives none. The tensors themselves are free to
    go once they are sent.
    """

    inputs: Tensors
    roots: tuple[GradientEdge | None, ...] | None = None


class Stage:
    """Computes cells: forward with or without a graph, and backward through a graph it kept or rebuilt."""

    def __init__(
        self, layers: Sequence[nn.Module], cells: Sequence[range], loss: nn.Module | None,
        device: torch.device, precision: str, seed: int, splits: bool = False,
    ) -> None:  # fmt: skip
        """Makes the layers of its ``cells``, and only these, from the whole model's list of meta-device ``layers``.

        ``loss`` is given to the last stage only. ``precision`` bf16 computes under autocast: parameters, gradients and
        their sums stay fp32, as matrix products on a TPU take bf16 factors of fp32 tensors; what stands between layers
        is bf16. With ``splits`` the gradients of weights can be put off.
        """
        self.cells, self.device, self.seed = tuple(cells), device, seed
        self.indices = tuple(index for cell in cells for index in cell)
        """Of all its layers, cell by cell."""
        self.layers = nn.ModuleList(
            by_micro_batch(materialise(layers[index], initial_seed(seed, index), device)) for index in self.indices
        )
        self.averages = MovingAverages(self.layers)
        self.loss = loss.to(device) if loss is not None else None
        self._mixed = precision == "bf16"
        made = iter(self.layers)
        self._cells = [nn.ModuleList(next(made) for _ in cell) for cell in cells]
        self._fronts = [Fronts([layers[index] for index in cell], self._mixed) for cell in cells]
        self.now: int | None = None
        """The layer whose forward runs; what fails or stands still there is told by it."""
        self.splits = splits
        self._splits = [Splits(splitting(cell)) for cell in self._cells] if splits else []

    def train(self, mode: bool) -> None:
        """Switches dropout and the like on or off in all layers."""
        self.layers.train(mode)
        if self.loss is not None:
            self.loss.train(mode)

    def parameters(self, turn: int) -> Iterator[nn.Parameter]:
        """Returns those of one cell, in the order of its layers."""
        return self._cells[turn].parameters()

    def leaving(self, front: Front, turn: int = 0) -> Front:
        """Returns the front behind a cell when ``front`` is before it."""
        return self._fronts[turn].behind(front)

    def forward(
        self, inputs: Tensors, arriving: Cargo, leaving: Cargo | None, targets: Tensors, step: int, micro_batch: int,
        turn: int = 0,
    ) -> tuple[Tensors, Tensor | None]:  # fmt: skip
        """Runs a cell on one micro-batch; ``micro_batch`` counts over the whole mini-batch, for the seeds.

        Returns what leaves the cell, or from the last one, where ``leaving`` is None, the objective as a 1-tuple and
        the measure.
        """
        tensors, stash = arriving.unpack(inputs)
        self.averages.begin(micro_batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._mixed):
            for index, layer in zip(self.cells[turn], self._cells[turn], strict=True):
                self.now = index
                set_seed(layer_seed(self.seed, step, micro_batch, index), self.device)
                if leaving is None and index == self.cells[turn][-1]:
                    assert self.loss is not None
                    taken = tuple(stash.pop(name) for name in takes_of(layer))
                    objective, measure = scored(layer, self.loss, (*tensors, *taken), targets)
                    self.now = None
                    return (objective,), measure.detach()
                tensors = call(layer, tensors, stash, narrow=self._mixed)
        self.now = None
        assert leaving is not None
        return leaving.pack(tensors, stash), None

    def graph(
        self, kept: Kept, arriving: Cargo, leaving: Cargo | None, targets: Tensors, step: int, micro_batch: int,
        turn: int = 0,
    ) -> tuple[Tensors, Tensor | None]:  # fmt: skip
        """Runs a cell so that a backward can follow: from leaf inputs, the outputs that carry gradients kept.

        The same code makes a first forward with graph and a rebuild, so both are equal to the bit.
        """
        kept.inputs = tuple(
            tensor.detach().requires_grad_() if spec.needs_gradient else tensor
            for tensor, spec in zip(kept.inputs, arriving.boundary, strict=True)
        )
        with torch.enable_grad():
            outputs, measure = self.forward(kept.inputs, arriving, leaving, targets, step, micro_batch, turn)
            if leaving is not None:
                outputs = announced(outputs, leaving.boundary)
        differentiable = (
            outputs
            if leaving is None
            else tuple(tensor for tensor, spec in zip(outputs, leaving.boundary, strict=True) if spec.needs_gradient)
        )
        kept.roots = tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in differentiable)
        return outputs, measure

    def backward(self, kept: Kept, gradients: Tensors, arriving: Cargo) -> Tensors:
        """Adds this micro-batch's gradients to the parameters'; returns those of the inputs that carry one.

        An input that took no part in the result gets zeros: the stage before waits for a gradient all the same.
        """
        assert kept.roots is not None, "backward before forward"
        live = [(root, grad) for root, grad in zip(kept.roots, gradients, strict=True) if root is not None]
        if live:
            torch.autograd.backward([root for root, _ in live], [grad for _, grad in live])
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor, spec in zip(kept.inputs, arriving.boundary, strict=True)
            if spec.needs_gradient
        )

    def input_backward(self, kept: Kept, gradients: Tensors, arriving: Cargo, turn: int = 0) -> tuple[Tensors, Later]:
        """As ``backward``, but puts off the weights' gradients; returns also the calls that add them."""
        returned: list[Tensors] = []
        later = self._splits[turn].collect(lambda: returned.append(self.backward(kept, gradients, arriving)))
        return returned[0], later

    def weigh(self, later: Later, turn: int = 0) -> Iterator[nn.Parameter]:
        """Adds what was put off while the caller iterates: over parameters, each when nothing is left to add to it."""
        return self._splits[turn].add(later)
