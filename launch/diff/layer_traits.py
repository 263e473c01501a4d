"""Traits of layers on which training depends, found by running each layer alone on its inputs.

    the same again                             other values       it remembers something, or uses the clock
    generators before and after a forward      other states       it draws random numbers
    buffers before and after                   other values       each forward changes them
    with the first row in place of the last    other first row    its rows depend on each other
    in evaluation mode                         other values       it computes something else there
    backward                                   no gradient        it ignores an input or a parameter

What a layer must not do is tried before any run (``experiments.custom.layer_trial``).
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from experiments.base.experiment import Experiment
from launch.diff.plain_training import build_layers, forward
from launch.worker.distributed import init_process_group
from suite.pipeline.model.changing_buffers import copies_of_buffers
from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.model.rng import seeded
from suite.pipeline.model.topology import RankCoord

SEED = 1

ROUNDING = 1e-4
"""A row has the same values if it differs by this share of them at most: products may add up in another order."""


@dataclass(frozen=True)
class Trait:
    """One of a layer."""

    text: str
    """Goes on after the layer's name."""
    depends_on_split: bool = False
    """Whether the layer computes something else where a mini-batch is split into other micro-batches."""


LayerTraits = dict[int, tuple[str, list[Trait]]]
"""The type and the traits of each layer that has some, by index."""


def find_traits(rank: int, world: int, rendezvous: str, chosen: Experiment, data: Path) -> LayerTraits:
    """Runs the first micro-batch through all layers, and tries each on what it gets; for ``run_processes``. A last
    layer with a ``score`` of its own is not tried."""
    device = init_process_group(rank, world, rendezvous, 1)
    layers, loss = build_layers(chosen, device)
    found: LayerTraits = {}
    handles: list[RemovableHandle] = []

    def try_layer(index: int, layer: nn.Module, inputs: Tensors) -> None:
        handles[index].remove()  # copies have no hook
        if traits := list(traits_of(layer, inputs)):
            found[index] = type(layer).__name__, traits

    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(partial(try_layer, index), prepend=True))
    batch = chosen.data_source(data, RankCoord(0, 1, 1)).batch(0)
    assert batch is not None
    with torch.no_grad():
        forward(layers, loss, batch.inputs[0], batch.targets[0], chosen, 0, 0)
    dist.destroy_process_group()
    return found


def traits_of(layer: nn.Module, inputs: Tensors) -> Iterator[Trait]:
    """Yields the traits of a layer in training mode, which does not change."""
    first = _Trial(layer, inputs)
    if not all(map(torch.equal, first.outputs, _Trial(layer, inputs).outputs)):
        yield Trait("returns other values for the same inputs and seeds")
        return  # what follows would compare them
    if first.draws:
        yield Trait("draws random numbers, with a seed for each micro-batch", depends_on_split=True)
    if first.changed_buffers:
        names = " and ".join(first.changed_buffers)
        yield Trait(f"changes {names} in each forward, so once a micro-batch", depends_on_split=True)
    rows = len(inputs[0])
    other_row = tuple(torch.cat([tensor[:-1], tensor[:1]]) if len(tensor) == rows else tensor for tensor in inputs)
    if not _equal(_first_rows(first.outputs, rows), _first_rows(_Trial(layer, other_row).outputs, rows)):
        yield Trait("has rows that depend on the other rows of their micro-batch", depends_on_split=True)
    if not (first.draws or first.changed_buffers or _equal(first.outputs, _Trial(layer, inputs, False).outputs)):
        yield Trait("computes something else in evaluation mode")
    for ignored in first.ignored():
        yield Trait(f"ignores its {ignored}: no gradient reaches it")


class _Trial:
    """One forward of a copy of a layer."""

    def __init__(self, layer: nn.Module, inputs: Tensors, is_training: bool = True) -> None:
        self._layer = copy.deepcopy(layer).train(is_training)
        self._leaves = tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
        buffers = copies_of_buffers(self._layer)
        device = torch.device("cpu")
        with seeded(SEED, device), torch.enable_grad():
            states = _generator_states()
            self._outputs = as_tuple(self._layer(*self._leaves))
            self.draws = states != _generator_states()
        self.outputs = tuple(output.detach() for output in self._outputs)
        self.changed_buffers = list(
            dict.fromkeys(name for module, name, value in buffers if not torch.equal(module.get_buffer(name), value))
        )

    def ignored(self) -> list[str]:
        """Returns the inputs and parameters on which no output depends. None has a graph afterwards."""
        with torch.enable_grad():
            sums = [output.double().sum() for output in self._outputs if output.requires_grad]
        if sums:
            torch.autograd.backward(sums)
        inputs = [(f"input {number}", tensor) for number, tensor in enumerate(self._leaves)]
        return [
            name
            for name, tensor in [*inputs, *self._layer.named_parameters()]
            if tensor.requires_grad and tensor.grad is None
        ]


def _generator_states() -> tuple[bytes, object, bytes]:
    numpy_state = np.random.get_state(legacy=False)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(numpy_state)


def _first_rows(tensors: Tensors, rows: int) -> Tensors:
    return tuple(tensor[:1] for tensor in tensors if tensor.dim() and len(tensor) == rows)


def _equal(some: Tensors, others: Tensors) -> bool:
    """Whether tensors are equal up to rounding."""
    return len(some) == len(others) and all(map(_equal_tensors, some, others))


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    largest = float(one.double().abs().nan_to_num().max())
    return torch.allclose(one.double(), other.double(), ROUNDING, ROUNDING * largest, equal_nan=True)
