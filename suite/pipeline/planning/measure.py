"""Measures layers on the local device: replaces the seconds of their estimated costs and raises their bytes.

Every layer runs as a stage of its own (``measured_cell.py``) on the outputs of the previous layer, so seeds, autocast
and shapes are those of a run. Equal layers are measured once. An estimate knows the tensors of operators alone; what a
measurement finds beyond them are workspaces of the device's kernels and a layer's own buffers. It may find less where
something is allocated at another time in a run. So bytes are the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from suite.pipeline.model.layers import Tensors
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.measured_cell import MakeUpdate, MeasuredCell, Synchronize, bytes_of, seconds_of
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.shape_inference import ShapeInference, first_equals
from suite.pipeline.runtime.skip import CellBoundary, SkipLayout, Stash, find_skips, pops_of, stashes_of
from suite.pipeline.runtime.stage import Stage

COPIES = 8
"""The most consecutive equal layers timed together: as in a stage, a layer's weights are not in the cache and its
memory is not just freed."""

LONGEST_PASS_S, MOST_PASS_BYTES = 1.0, 1 << 30
"""Seconds and bytes of a pass through all layers, forward and backward, beyond which they are not timed together: long
layers take as long as alone, and may not fit together."""


def measure(
    estimated: Sequence[LayerCost],
    layers: Sequence[nn.Module],
    loss: nn.Module,
    sample: Sample,
    device: torch.device,
    precision: str,
    make_update: MakeUpdate,
    synchronize: Synchronize = bool,
    memory_bytes: float = math.inf,
) -> list[LayerCost]:
    """Returns the ``estimated`` costs of meta-device layers with measured seconds, and bytes where those are larger.

    Seconds are those of the typical micro-batch, bytes those of the largest, which the estimate must be of too; the
    loss counts to the last layer. ``make_update`` returns a function that updates a module's parameters once.

    ``synchronize`` is called before each round with whether this process wants one, and returns whether any does:
    processes that will compute at the same time measure at the same time, because they share caches and memory. Layers
    are timed all together only where that takes less than a quarter of ``memory_bytes``: the process and temporary
    tensors may need the rest.
    """
    typical, largest = (_Model(layers, loss, data, device, precision) for data in (sample.typical, sample.largest))
    seconds = typical.measured(COPIES, lambda cell: seconds_of(cell, make_update, synchronize))
    sizes = largest.measured(1, lambda cell: bytes_of(cell, make_update))
    costs = [
        replace(cost, **own_s, **{name: max(size, getattr(cost, name)) for name, size in own_bytes.items()})
        for cost, own_s, own_bytes in zip(estimated, seconds, sizes, strict=True)
    ]
    needed_bytes = sum(16 * cost.parameters + cost.activation_bytes for cost in costs)
    is_short = sum(cost.seconds for cost in costs) < LONGEST_PASS_S
    is_small = needed_bytes < min(MOST_PASS_BYTES, memory_bytes / 4)
    if len(layers) == 1 or not synchronize(is_short and is_small):
        return costs
    together = typical.cell(range(len(layers)), typical.inputs, {})
    return _scaled_to(together.seconds(make_update, synchronize), costs)


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


class _Model:
    """Any of the layers as a stage of their own, for one micro-batch."""

    def __init__(
        self, layers: Sequence[nn.Module], loss: nn.Module, data: MicroBatch, device: torch.device, precision: str
    ) -> None:
        self.inputs = tuple(tensor.to(device) for tensor in data.inputs)
        self._targets = tuple(tensor.to(device) for tensor in data.targets)
        self._layers, self._loss, self._device, self._precision = layers, loss, device, precision
        self._skips = find_skips(layers)
        self._cuts = ShapeInference(layers, precision == "bf16").infer_all(CutSpec.of(self.inputs))

    def cell(self, cell: range, tensors: Tensors, stash: Stash, defers: bool = False) -> MeasuredCell:
        """Returns a cell that gets these tensors and skips; ``defers`` splits its backward."""
        loss = self._loss if cell[-1] == len(self._layers) - 1 else None
        stage = Stage(self._layers, [cell], loss, self._device, self._precision, seed=0, defers_weight_grads=defers)
        return MeasuredCell(stage, self._boundaries_of(cell), tensors, stash, self._targets)

    def measured(self, copies: int, measure: Callable[[Callable[[bool], MeasuredCell]], Any]) -> list[Any]:
        """Runs the micro-batch through all layers and returns for each what ``measure`` finds. It gets a function that
        makes a cell of the first of equal layers, with up to ``copies`` that follow one another."""
        firsts, tensors, stash = first_equals(self._layers, self._cuts), self.inputs, Stash()
        found: dict[int, Any] = {}
        outputs: dict[int, tuple[Tensors, Tensors]] = {}
        for index, (layer, first) in enumerate(zip(self._layers, firsts, strict=True)):
            if first == index:
                leaving, stashed = self.cell(range(index, index + 1), tensors, stash).outputs()
                outputs[index] = leaving, tuple(stashed[name] for name in stashes_of(layer))
                equal = len([*takewhile(index.__eq__, firsts[index:])])
                cell = range(index, index + min(copies, equal))
                found[index] = measure(partial(self.cell, cell, tensors, stash))
            tensors, skips = outputs[first]
            for name in pops_of(layer):
                del stash[name]
            stash.update(zip(stashes_of(layer), skips, strict=True))
        return [found[first] for first in firsts]

    def _boundaries_of(self, cell: range) -> tuple[CellBoundary, CellBoundary | None]:
        """Returns the input and output boundary of a cell in a partition with one cell before it and one behind."""
        cells = [part for part in (range(cell[0]), cell, range(cell[-1] + 1, len(self._layers))) if part]
        skip_layout = SkipLayout(self._skips, cells, cells.index(cell))
        leaving = skip_layout.output_boundary(self._cuts[cell[-1] + 1]) if cell is not cells[-1] else None
        return skip_layout.input_boundary(self._cuts[cell[0]]), leaving
