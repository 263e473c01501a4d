"""Traits of layers on which training depends, found by running each layer alone on its inputs.

    the same again                             other values       it remembers something, or uses the clock
    generators before and after a forward      other states       it draws random numbers
    buffers before and after                   other values       each forward changes them
    attributes before and after                other values       it remembers something that is no buffer
    with neighbours in place of other rows     other rows         its rows depend on each other
    in evaluation mode                         other values       it computes something else there
    backward                                   no gradient        it ignores an input or a parameter

What a layer must not do is tried before any run (``experiments.custom.layer_trial``).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.base.experiment import Experiment
from experiments.custom.layer_trial import KEEP_STATE, attributes_of, changed_attributes, same_bits
from launch.diff.plain_training import build_layers, forward
from launch.worker.distributed import init_process_group
from suite.errors import typed_line
from suite.pipeline.model.layer_copy import copied
from suite.pipeline.model.layers import Tensors, as_tuple, structure_key
from suite.pipeline.model.rng import seeded
from suite.pipeline.model.topology import RankCoord

SEED = 1

ROUNDING = 1e-6
"""The share of the largest value by which values may differ that are the same but for rounding."""


@dataclass(frozen=True)
class Trait:
    text: str
    """A sentence without its subject, the layer."""
    remedy: str = ""
    """What to do if it is not meant; empty for what most models mean."""
    is_fault: bool = False
    """Whether other micro-batches train another model, and no user means it."""
    depends_on_split: bool = False
    """Whether the layer computes something else where a mini-batch is split into other micro-batches."""


LayerTraits = dict[int, tuple[str, list[Trait]]]
"""The type and the traits of each layer that has some, by index."""


def find_traits(rank: int, world: int, rendezvous: str, chosen: Experiment, data: Path) -> LayerTraits:
    """Runs the first micro-batch through all layers, and tries each on what it gets, of equal ones the first; for
    ``run_processes``. A last layer with a ``gpipe_score`` of its own is not tried."""
    device = init_process_group(rank, world, rendezvous, 1)
    layers, loss = build_layers(chosen, device)
    batch = chosen.data_source(data, RankCoord(0, 1, 1)).batch(0)
    assert batch is not None
    rows, targets = len(batch.inputs[0][0]), batch.targets[0]
    found: LayerTraits = {}
    known: dict[Hashable, list[Trait]] = {}

    def try_layer(index: int, layer: nn.Module, inputs: Tensors) -> None:
        if index == len(layers) - 1 and getattr(layer, "gpipe_score", None):
            return
        key = _key(layer), *((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in known:
            try:
                known[key] = list(traits_of(layer, inputs, rows))
            except Exception as error:  # of the user's code
                known[key] = [Trait(f"cannot be tried alone ({typed_line(error)})")]
        is_last = index == len(layers) - 1
        traits = [*known[key], *(_loss_traits(loss, layer, inputs, targets, rows) if is_last else ())]
        if traits:
            found[index] = type(layer).__name__, traits

    with torch.no_grad():
        forward(layers, loss, batch, 0, chosen, 0, device, try_layer)
    dist.destroy_process_group()
    return found


def _key(layer: nn.Module) -> Hashable:
    """Returns a key that is equal for layers with the same traits: their structure says nothing of values in buffers
    and of hooks."""
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    return id(layer) if has_hooks or any(True for _ in layer.buffers()) else structure_key(layer)


def traits_of(layer: nn.Module, inputs: Tensors, rows: int) -> Iterator[Trait]:
    """Yields the traits of a layer in training mode, which stays as it is. A micro-batch has ``rows`` rows."""
    first = _Trial(layer, inputs)
    if not all(map(same_bits, first.outputs, _Trial(layer, inputs).outputs)):
        yield Trait("returns other values for the same inputs and seeds", KEEP_STATE)
        return  # what follows would compare them
    if first.draws:
        yield Trait("draws random numbers, with a seed for each micro-batch", depends_on_split=True)
    for change in first.changed_attributes:
        yield Trait(f"{change} in each forward, and again in each recompute", KEEP_STATE)
    if buffers := first.changed_buffers:
        others = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
        yield Trait(f"changes its buffer {buffers[0]}{others} in each forward", depends_on_split=True)
    if any(_depends_on_others(layer, inputs, first.outputs, rows, kept) for kept in (0, 1)):
        remedy = "" if buffers else "mix no rows, or other micro-batches train another model"
        yield Trait("has rows that depend on the other rows of their micro-batch", remedy, depends_on_split=True)
    if not (first.draws or buffers or _equal(first.outputs, _Trial(layer, inputs, False).outputs)):
        yield Trait("computes something else in evaluation mode")
    for ignored in first.ignored():
        yield Trait(f"ignores its {ignored}: no gradient reaches it", "use it or leave it out")


def _loss_traits(loss: nn.Module, layer: nn.Module, inputs: Tensors, targets: Tensors, rows: int) -> Iterator[Trait]:
    """Yields a trait of the last layer if the loss summed over a micro-batch is not the sum over its halves."""
    tensors, half = (*_Trial(layer, inputs).outputs, *targets), rows // 2
    parts = (torch.arange(rows), torch.arange(half), torch.arange(half, rows)) if half else ()
    sums = [float(loss(*_rows_of(tensors, rows, part))[0]) for part in parts]
    if sums and abs(sums[0] - sums[1] - sums[2]) > 100 * ROUNDING * max(map(abs, sums)):
        totals = "{:.4g} for {} rows, {:.4g} and {:.4g} for their halves".format(sums[0], rows, *sums[1:])
        remedy = "return a mean over rows, or give units (docs/own-model.md)"
        yield Trait(f"ends in a loss that is no mean over rows: its sums are {totals}", remedy, is_fault=True)


def _depends_on_others(layer: nn.Module, inputs: Tensors, outputs: Tensors, rows: int, kept: int) -> bool:
    """Whether every second row, from ``kept`` on, gives something else once each other row is a copy of its neighbour.

    kept = 0: rows 0 0 2 2 4      kept = 1: rows 1 1 1 3 3
    """
    if rows < 2:
        return False
    sources = torch.tensor([row if row % 2 == kept else abs(row - 1) for row in range(rows)])
    has_rows = [tensor.dim() > 0 and len(tensor) == rows for tensor in inputs]
    changed = tuple(tensor[sources] if own else tensor for tensor, own in zip(inputs, has_rows, strict=True))
    if not any(has_rows):  # a layer on sequences may have them on its second axis
        changed = _rows_of(inputs, rows, sources)
    own = torch.arange(kept, rows, 2)
    return not _equal(_rows_of(outputs, rows, own), _rows_of(_Trial(layer, changed).outputs, rows, own))


def _rows_of(tensors: Tensors, rows: int, chosen: Tensor) -> Tensors:
    """Returns the chosen rows, along the first axis that is as long as there are rows; a tensor without one whole."""
    axes = [next((axis for axis, size in enumerate(tensor.shape) if size == rows), None) for tensor in tensors]
    return tuple(
        tensor if axis is None else tensor.index_select(axis, chosen)
        for tensor, axis in zip(tensors, axes, strict=True)
    )


class _Trial:
    """One forward of a copy of a layer."""

    def __init__(self, layer: nn.Module, inputs: Tensors, is_training: bool = True) -> None:
        self._layer = copied(layer, torch.clone).train(is_training)
        self._leaves = tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
        buffers = {name: buffer.clone() for name, buffer in self._layer.named_buffers()}
        attributes = attributes_of(self._layer)
        with seeded(SEED, torch.device("cpu")), torch.enable_grad():
            states = _generator_states()
            self._outputs = as_tuple(self._layer(*self._leaves))
            self.draws = states != _generator_states()
        self.outputs = tuple(output.detach() for output in self._outputs)
        self.changed_attributes = changed_attributes(attributes, attributes_of(self._layer))
        self.changed_buffers = [
            name for name, buffer in self._layer.named_buffers() if not same_bits(buffer, buffers[name])
        ]

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


def _generator_states() -> bytes:
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()))


def _equal(some: Tensors, others: Tensors) -> bool:
    """Whether tensors are equal up to rounding."""
    return len(some) == len(others) and all(map(_equal_tensors, some, others))


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    largest = float(one.double().abs().nan_to_num().max())
    return torch.allclose(one.double(), other.double(), ROUNDING, ROUNDING * largest, equal_nan=True)
