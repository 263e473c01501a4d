"""Measures layers on the local device: replaces the seconds of their estimated costs and raises their bytes.

Every layer runs as a stage of its own (``suite.pipeline.runtime.stage``) on the outputs of the previous layer, so
seeds, autocast and shapes are those of a run. Equal layers are measured once. An estimate knows the tensors of
operators alone; what a measurement finds beyond them are workspaces of the device's kernels and a layer's own buffers.
It may find less where something is allocated at another time in a run. So bytes are the larger of the two.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from suite.device import is_host, synchronize
from suite.pipeline.model.layers import Tensors, trainable
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.memory_tracker import tracked_memory
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.shape_inference import ShapeInference, first_equals
from suite.pipeline.runtime.skip import CellBoundary, SkipLayout, Stash, find_skips, pops_of, stashes_of
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.weight_grad import DeferredGrads

Update = Callable[[], None]
MakeUpdate = Callable[[nn.Module], Update]
Synchronize = Callable[[bool], bool]

WARM_UPS, LEAST_ROUNDS = 2, 5
SECONDS_A_LAYER = 0.4
"""Measuring time of each distinct layer; at least ``LEAST_ROUNDS`` rounds, and three of all layers together."""

DEVICE_REPEATS = 4
"""Calls timed together on a GPU, to amortise its synchronisation."""

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
    model = partial(_Model, layers, loss, ShapeInference(layers, precision == "bf16"), device, precision)
    typical, largest = model(sample.typical), model(sample.largest)
    seconds = typical.measured(COPIES, lambda cell: _seconds_of(cell, make_update, synchronize))
    sizes = largest.measured(1, lambda cell: _bytes_of(cell, make_update))
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
    # each round sums over all layers
    return _scaled_to(together.seconds(make_update, synchronize, warm_ups=1, least_rounds=3), costs)


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
        self,
        layers: Sequence[nn.Module],
        loss: nn.Module,
        shapes: ShapeInference,
        device: torch.device,
        precision: str,
        data: MicroBatch,
    ) -> None:
        self.inputs = tuple(tensor.to(device) for tensor in data.inputs)
        self._targets = tuple(tensor.to(device) for tensor in data.targets)
        self._layers, self._loss, self._device, self._precision = layers, loss, device, precision
        self._skips = find_skips(layers)
        self._cuts = shapes.infer_all(CutSpec.of(self.inputs))

    def cell(self, cell: range, tensors: Tensors, stash: Stash, defers: bool = False) -> _Cell:
        """Returns a cell that gets these tensors and skips; ``defers`` splits its backward."""
        loss = self._loss if cell[-1] == len(self._layers) - 1 else None
        stage = Stage(self._layers, [cell], loss, self._device, self._precision, seed=0, defers_weight_grads=defers)
        return _Cell(stage, self._boundaries_of(cell), tensors, stash, self._targets)

    def measured(self, copies: int, measure: Callable[[Callable[[bool], _Cell]], Any]) -> list[Any]:
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


def _seconds_of(cell: Callable[[bool], _Cell], make_update: MakeUpdate, synchronize: Synchronize) -> dict[str, float]:
    """Returns mean seconds of a layer's forward, recompute, backward and update, and what splitting the backward
    changes. ``cell(defers)`` makes the cell with a full or a split backward."""
    whole = cell(False).seconds(make_update, synchronize, WARM_UPS, LEAST_ROUNDS)
    split_cell = cell(True)
    if not split_cell.defers:
        return whole
    split = split_cell.seconds(make_update, synchronize, WARM_UPS, LEAST_ROUNDS)
    names = ("recompute_s", "backward_s", "weight_grad_s")
    extra_s = sum(split[name] for name in names) - sum(whole[name] for name in names)
    return whole | {
        "weight_grad_s": min(split["weight_grad_s"], whole["backward_s"]),
        "split_s": max(0.0, extra_s),
    }


def _bytes_of(cell: Callable[[bool], _Cell], make_update: MakeUpdate) -> dict[str, int]:
    """Returns the sizes of a ``LayerCost`` that a measurement can find. One is below zero where a layer frees what it
    kept of an earlier forward."""
    return cell(False).bytes(make_update) | {"deferred_bytes": cell(True).deferred_bytes()}


class _Cell:
    """A stage of one cell, with its inputs."""

    def __init__(
        self,
        stage: Stage,
        boundaries: tuple[CellBoundary, CellBoundary | None],
        tensors: Tensors,
        stash: Stash,
        targets: Tensors,
    ) -> None:
        self._stage, self._targets = stage, targets
        self._arriving, self._leaving = boundaries
        inputs = self._arriving.pack(tensors, dict(stash))
        self._inputs = tuple(tensor.detach() for tensor in inputs)
        self._objective = torch.float32
        stage.train(True)

    def outputs(self) -> tuple[Tensors, Stash]:
        """Returns the next layer's inputs, and skips; ``requires_grad`` says which need a gradient."""
        outputs, _ = self._graph(self._new_micro_batch())
        if self._leaving is None:
            return (), {}
        free = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
        return self._leaving.unpack(free)

    @property
    def defers(self) -> bool:
        """Whether it defers weight gradients."""
        return self._stage.defers_weight_grads and any(
            hasattr(module, "gpipe_grad_queue") for module in self._stage.layers.modules()
        )

    def seconds(
        self, make_update: MakeUpdate, synchronize: Synchronize, warm_ups: int, least_rounds: int
    ) -> dict[str, float]:
        """Returns a layer's mean seconds of forward, recompute, backward, deferred weight gradients and update, and the
        rounds' spread."""
        update = make_update(self._stage.layers)
        rounds: list[tuple[float, ...]] = []
        deadline_s = time.perf_counter() + SECONDS_A_LAYER / (2 if self.defers else 1)
        with self._stage.weights_cast_once():
            while synchronize(len(rounds) < warm_ups + least_rounds or time.perf_counter() < deadline_s):
                rounds.append(self._round(update))
        names = ("forward_s", "recompute_s", "backward_s", "weight_grad_s", "update_s")
        columns = zip(*rounds[warm_ups:], strict=True)
        count = len(self._stage.layers)
        means = {name: _ordinary_mean(column) / count for name, column in zip(names, columns, strict=True)}
        lower, _, upper = statistics.quantiles(map(sum, rounds[warm_ups:]), n=4)
        return means | {"relative_spread": upper / lower if lower else 1.0}  # 0: below the clock's resolution

    def bytes(self, make_update: MakeUpdate) -> dict[str, int]:
        """Returns sizes of a ``LayerCost``; gradients and optimizer state are allocated beforehand."""
        device, update = self._stage.device, make_update(self._stage.layers)
        self._backward(*self._recomputed(), [])
        update()
        for parameter in trainable(self._stage.layers):
            parameter.grad = torch.zeros_like(parameter)
        with self._stage.weights_cast_once():
            with tracked_memory(device) as first_forward:
                self._forward()
            with tracked_memory(device) as forward:
                self._forward()
            saved = self._new_micro_batch()
            with tracked_memory(device) as graph:
                outputs = self._graph(saved)[0]  # all of them, also those without a gradient
            del outputs
            gradients = self._gradients(saved)
            with tracked_memory(device) as backward:
                self._backward(saved, gradients, [])
        with tracked_memory(device) as updating:
            update()
        return {
            "cast_bytes": first_forward.change - forward.change,
            "activation_bytes": graph.change,
            "forward_peak_bytes": forward.peak,
            "graph_peak_bytes": graph.peak,
            "backward_peak_bytes": backward.peak,
            "update_peak_bytes": updating.peak,
        }

    def deferred_bytes(self) -> int:
        """Returns the bytes held between the two parts of a backward."""
        if not self.defers:
            return 0
        deferred: list[DeferredGrads] = []
        for parameter in trainable(self._stage.layers):
            parameter.grad = torch.zeros_like(parameter)
        with self._stage.weights_cast_once():
            self._forward()
            with tracked_memory(self._stage.device) as held:
                saved, gradients = self._recomputed()
                self._backward(saved, gradients, deferred)
                del saved, gradients
        return held.change

    def _new_micro_batch(self) -> CellMicroBatch:
        return CellMicroBatch(self._inputs, self._arriving, self._leaving)

    def _forward(self) -> Any:
        with torch.no_grad():
            return self._stage.forward(self._new_micro_batch(), self._targets)

    def _graph(self, saved: CellMicroBatch) -> tuple[Tensors, Tensor | None]:
        found = self._stage.forward_with_graph(saved, self._targets)
        self._objective = found[0][0].dtype  # used only in the last cell
        return found

    def _recomputed(self) -> tuple[CellMicroBatch, Tensors]:
        saved = self._new_micro_batch()
        self._graph(saved)
        return saved, self._gradients(saved)

    def _gradients(self, saved: CellMicroBatch) -> Tensors:
        """Returns a gradient for each output edge."""
        assert saved.output_edges is not None
        device = self._stage.device
        if self._leaving is None:
            return (torch.full((), 1e-3, dtype=self._objective, device=device),)
        return tuple(spec.empty(device).fill_(1e-3) for spec in self._leaving.tensors if spec.needs_gradient)

    def _backward(self, saved: CellMicroBatch, gradients: Tensors, deferred: list[DeferredGrads]) -> Tensors:
        """Runs a backward; gradients that it defers are appended to ``deferred``."""
        if not self.defers:
            return self._stage.backward(saved, gradients)
        returned, grads = self._stage.backward_input(saved, gradients)
        deferred.append(grads)
        return returned

    def _round(self, update: Update) -> tuple[float, ...]:
        repeats = 1 if is_host(self._stage.device) else DEVICE_REPEATS
        saved = [self._new_micro_batch() for _ in range(repeats)]
        forward = self._time(lambda: [self._forward() for _ in saved])
        recompute = self._time(lambda: [self._graph(micro_batch) for micro_batch in saved])
        gradients = [self._gradients(micro_batch) for micro_batch in saved]
        deferred: list[DeferredGrads] = []
        # as in a stage, a backward ends when its graph is freed
        backward = self._time(lambda: [self._backward(saved.pop(), gradients.pop(), deferred) for _ in range(repeats)])
        weight = self._time(lambda: [list(self._stage.backward_weight(grads)) for grads in deferred])
        deferred.clear()
        return *(seconds / repeats for seconds in (forward, recompute, backward, weight)), self._time(update)

    def _time(self, what: Callable[[], Any]) -> float:
        synchronize(self._stage.device)
        begin = time.perf_counter()
        what()
        synchronize(self._stage.device)
        return time.perf_counter() - begin


def _ordinary_mean(seconds: Sequence[float]) -> float:
    """Returns the mean without rounds that took over 1.5 times the median, which other work on the machine delayed.

    A step is a sum of actions, so their mean counts, not their median.
    """
    bound = 1.5 * statistics.median(seconds)
    return statistics.fmean(value for value in seconds if value <= bound)
