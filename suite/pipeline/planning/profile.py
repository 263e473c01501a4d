"""Measures the cost of each layer on the local device: seconds and bytes of the code that a stage runs.

Every layer runs as a stage of its own (``suite.pipeline.runtime.stage``) on the outputs of the previous layer, so
seeds, autocast and shapes are those of a run. Layers with the same structure and the same inputs are measured once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from suite.pipeline.model.layers import Tensors, structure_key
from suite.pipeline.planning.costs import LayerCost, cut_costs
from suite.pipeline.planning.measured_layer import (
    SECONDS_A_LAYER,
    MeasuredLayer,
    Synchronize,
    Update,
    layer_bytes,
    layer_seconds,
)
from suite.pipeline.runtime.boundary import CutSpec, TensorSpec
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import CellBoundary, Skip, SkipLayout, Stash, find_skips, pops_of, stashes_of
from suite.pipeline.runtime.stage import Stage

COPIES = 8
"""The most consecutive equal layers timed together: as in a stage, a layer's weights are not in the cache and its
memory is not just freed."""

LONGEST_PASS_S, MOST_PASS_BYTES = 1.0, 1 << 30
"""Seconds and bytes of a pass through all layers, forward and backward, beyond which they are not timed together: long
layers take as long as alone, and may not fit together."""


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of the first layer and the targets of the loss."""

    inputs: Tensors
    targets: Tensors


@dataclass(frozen=True)
class Sample:
    """Micro-batches to measure with: a typical one for seconds, and the one that needs the most bytes."""

    typical: MicroBatch
    largest: MicroBatch
    units: float | None = None
    """Units, such as tokens, of the typical one; None: an equal share of the mini-batch."""


def profile(
    layers: Sequence[nn.Module],
    loss: nn.Module,
    data: Sample,
    device: torch.device,
    precision: str,
    make_update: Callable[[nn.Module], Update],
    synchronize: Synchronize = bool,
    memory_bytes: float = math.inf,
) -> list[LayerCost]:
    """Returns the cost of each of the meta-device ``layers``; the loss counts to the last.

    Seconds are those of the typical micro-batch, bytes those of the largest. ``make_update`` returns a function that
    updates a module's parameters once. ``synchronize`` is called before each round with whether this process wants one,
    and returns whether any does: processes that will compute at the same time measure at the same time, because they
    share caches and memory. Layers are timed all together only where that takes less than a quarter of
    ``memory_bytes``: the process and temporary tensors may need the rest.
    """
    typical, largest = (_Stages(layers, loss, device, precision, each) for each in (data.typical, data.largest))
    seconds = _walk(typical, COPIES, lambda stage: layer_seconds(stage, make_update, synchronize))
    sizes = _walk(largest, 1, lambda stage: layer_bytes(stage, make_update))
    costs = [LayerCost(**seconds_of | sizes_of) for seconds_of, sizes_of in zip(seconds, sizes, strict=True)]
    needed_bytes = sum(16 * cost.parameters + cost.activation_bytes for cost in costs)
    is_short = sum(cost.seconds for cost in costs) < LONGEST_PASS_S
    is_small = needed_bytes < min(MOST_PASS_BYTES, memory_bytes / 4)
    if len(layers) == 1 or not synchronize(is_short and is_small):
        return costs
    together = typical.stage(range(len(layers)), typical.inputs, {})
    return _scaled_to(together.seconds(make_update, synchronize, SECONDS_A_LAYER), costs)


class _Stages:
    """Any of the layers as a stage of their own, for one micro-batch."""

    def __init__(
        self, layers: Sequence[nn.Module], loss: nn.Module, device: torch.device, precision: str, data: MicroBatch
    ) -> None:
        self.layers, self._loss, self._device, self._precision = layers, loss, device, precision
        self.inputs, self._targets = (
            tuple(tensor.to(device) for tensor in tensors) for tensors in (data.inputs, data.targets)
        )
        self.skips = find_skips(layers)
        self.cuts = ShapeInference(layers, precision == "bf16").infer_all(CutSpec.of(self.inputs))

    def stage(self, cell: range, tensors: Tensors, stash: Stash, defers: bool = False) -> MeasuredLayer:
        """Returns the layers of a cell as a stage that gets these tensors and skips."""
        loss = self._loss if cell[-1] == len(self.layers) - 1 else None
        stage = Stage(self.layers, [cell], loss, self._device, self._precision, seed=0, defers_weight_grads=defers)
        return MeasuredLayer(stage, _boundaries_of(self.skips, cell, self.cuts), tensors, stash, self._targets)


def _scaled_to(mean_s: dict[str, float], costs: Sequence[LayerCost]) -> list[LayerCost]:
    """Returns the costs, scaled so that their means are those of one stage. Short layers take longer there than alone:
    alone, their weights and activations stay in the cache."""
    factor = {
        name: len(costs) * mean_s[name] / sum(getattr(cost, name) for cost in costs)
        for name in ("forward_s", "recompute_s", "backward_s")
        if any(getattr(cost, name) for cost in costs)  # else all are below the clock's resolution
    }
    factor |= dict.fromkeys(("weight_grad_s", "split_s"), factor.get("backward_s", 1.0))
    return [replace(cost, **{name: share * getattr(cost, name) for name, share in factor.items()}) for cost in costs]


def _walk(
    stages: _Stages, copies: int, measure: Callable[[Callable[[bool], MeasuredLayer]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Runs the micro-batch through all layers and measures each distinct one, up to ``copies`` equal ones together."""
    layers, cuts, tensors = stages.layers, stages.cuts, stages.inputs
    structures = [structure_key(layer) for layer in layers]
    stash: Stash = {}
    known: dict[Hashable, tuple[dict[str, Any], Tensors, Tensors]] = {}
    found = []
    for index, layer in enumerate(layers):
        popped = tuple(TensorSpec.of(stash[name]) for name in pops_of(layer))
        key = (structures[index], cuts[index].main, popped, index == len(layers) - 1)
        if key not in known:
            outputs, stashed = stages.stage(range(index, index + 1), tensors, stash).outputs()
            end_of_equal = next(
                (at for at in range(index, len(layers)) if structures[at] != structures[index]), len(layers)
            )
            count = 1
            if _shapes(cuts[index + 1]) == _shapes(cuts[index]):  # else the next one is not equal
                count = max(1, min(copies, end_of_equal - index, len(layers) - 1 - index))
            numbers = measure(partial(stages.stage, range(index, index + count), tensors, stash))
            known[key] = numbers, outputs, tuple(stashed[name] for name in stashes_of(layer))
        numbers, tensors, skipped = known[key]
        found.append(numbers | cut_costs(cuts, stages.skips, index))
        for name in pops_of(layer):
            del stash[name]
        stash.update(zip(stashes_of(layer), skipped, strict=True))
    return found


def _shapes(cut: CutSpec) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(spec.shape, spec.dtype) for spec in cut.main]


def _boundaries_of(
    skips: Sequence[Skip], cell: range, cuts: Sequence[CutSpec]
) -> tuple[CellBoundary, CellBoundary | None]:
    """Returns the input and output boundary of a cell in a partition with one cell before it and one behind."""
    cells = [part for part in (range(cell[0]), cell, range(cell[-1] + 1, len(cuts) - 1)) if part]
    skip_layout = SkipLayout(skips, cells, cells.index(cell))
    leaving = skip_layout.output_boundary(cuts[cell[-1] + 1]) if cell is not cells[-1] else None
    return skip_layout.input_boundary(cuts[cell[0]]), leaving
