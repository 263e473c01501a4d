"""Measures the cost of each layer on the local device: seconds and bytes of the code that a stage runs.

Every layer runs as a stage of its own (``suite.pipeline.runtime.stage``) on the outputs of the previous layer, so
seeds, autocast and shapes are those of a run. Layers with the same structure and the same inputs are measured once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from suite.device import is_host, synchronize
from suite.pipeline.model.batchnorm import recorded_bytes
from suite.pipeline.model.layers import Tensors, frozen_values, structure_key, trainable
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.memory_tracker import MemoryTracker
from suite.pipeline.planning.skip_costs import cut_costs
from suite.pipeline.runtime.boundary import CutSpec, TensorSpec
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import CellBoundary, Skip, SkipLayout, Stash, find_skips, pops_of, stashes_of
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.weight_grad import DeferredGrads

Update = Callable[[], None]
Synchronize = Callable[[bool], bool]

WARM_UPS, LEAST_ROUNDS = 2, 5
SECONDS_A_LAYER = 0.6
"""Measuring time of each distinct layer; at least ``LEAST_ROUNDS`` rounds of forward, recompute and backward."""

COPIES = 8
"""The most consecutive equal layers timed together: as in a stage, a layer's weights are not in the cache and its
memory is not just freed."""

DEVICE_REPEATS = 4
"""Calls timed together on a GPU, to amortise its synchronisation."""


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
) -> list[LayerCost]:
    """Returns the cost of each of the meta-device ``layers``; the loss counts to the last.

    Seconds are those of the typical micro-batch, bytes those of the largest. ``make_update`` returns a function that
    updates a module's parameters once. ``synchronize`` is called before each round with whether this process wants one,
    and returns whether any does: processes that will compute at the same time measure at the same time, because they
    share caches and memory.
    """
    typical = _walk(
        layers,
        loss,
        data.typical,
        device,
        precision,
        COPIES,
        lambda profiler: profiler.seconds(make_update, synchronize),
    )
    largest = _walk(layers, loss, data.largest, device, precision, 1, lambda profiler: profiler.bytes(make_update))
    return [LayerCost(**seconds | sizes) for seconds, sizes in zip(typical, largest, strict=True)]


def _walk(
    layers: Sequence[nn.Module],
    loss: nn.Module,
    data: MicroBatch,
    device: torch.device,
    precision: str,
    copies: int,
    measure: Callable[[_LayerProfiler], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Runs a micro-batch through all layers and measures each distinct one."""
    skips, structures = find_skips(layers), [structure_key(layer) for layer in layers]
    targets = tuple(tensor.to(device) for tensor in data.targets)
    tensors = tuple(tensor.to(device) for tensor in data.inputs)
    cuts = ShapeInference(layers, precision == "bf16").infer_all(CutSpec.of(tensors))
    stash: Stash = {}
    known: dict[Hashable, tuple[dict[str, Any], Tensors, Tensors]] = {}
    found = []

    def profiler_of(index: int, count: int, loss: nn.Module | None) -> _LayerProfiler:
        cell = range(index, index + count)
        boundaries = _boundaries_of(skips, cell, cuts)

        def stage(defers: bool) -> _MeasuredLayer:
            made = Stage(layers, [cell], loss, device, precision, seed=0, defers_weight_grads=defers)
            return _MeasuredLayer(made, boundaries, tensors, stash, targets)

        return _LayerProfiler(stage)

    for index, layer in enumerate(layers):
        last = index == len(layers) - 1
        popped = tuple(TensorSpec.of(stash[name]) for name in pops_of(layer))
        key = (structures[index], cuts[index].main, popped, last)
        if key not in known:
            profiler = profiler_of(index, 1, loss if last else None)
            outputs, stashed = profiler.outputs()
            end_of_equal = next(
                (at for at in range(index, len(layers)) if structures[at] != structures[index]), len(layers)
            )
            count = min(copies, end_of_equal - index, len(layers) - 1 - index)
            if count > 1 and _shapes(cuts[index + 1]) == _shapes(cuts[index]):  # else the next one is not equal
                profiler = profiler_of(index, count, None)
            known[key] = measure(profiler), outputs, tuple(stashed[name] for name in stashes_of(layer))
        numbers, tensors, skipped = known[key]
        found.append(numbers | cut_costs(cuts, skips, index))
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


class _LayerProfiler:
    """Measures one layer, or several equal ones, with a full backward and then with a split one."""

    def __init__(self, stage: Callable[[bool], _MeasuredLayer]) -> None:
        self._stage = stage

    def outputs(self) -> tuple[Tensors, Stash]:
        """Returns the next layer's inputs, and skips; ``requires_grad`` says which need a gradient."""
        return self._stage(False).outputs()

    def seconds(self, make_update: Callable[[nn.Module], Update], synchronize: Synchronize) -> dict[str, float]:
        """Returns mean seconds of forward, recompute, backward and update, and what splitting changes."""
        found = self._stage(False).seconds(make_update, synchronize, SECONDS_A_LAYER)
        split = self._stage(True)
        if not split.defers:
            return found
        split_costs = split.seconds(make_update, synchronize, SECONDS_A_LAYER / 2)
        total_s = [
            sum(costs[name] for name in ("recompute_s", "backward_s", "weight_grad_s"))
            for costs in (found, split_costs)
        ]
        weight = min(split_costs["weight_grad_s"], found["backward_s"])
        return found | {"weight_grad_s": weight, "split_s": max(0.0, total_s[1] - total_s[0])}

    def bytes(self, make_update: Callable[[nn.Module], Update]) -> dict[str, int]:
        """Returns the sizes of a ``LayerCost``; gradients and optimizer state are allocated beforehand. A difference of
        two measurements that vary may be below zero and then counts as none."""
        sizes = self._stage(False).bytes(make_update) | {"deferred_bytes": self._stage(True).deferred_bytes()}
        return {name: max(0, size) for name, size in sizes.items()}


class _MeasuredLayer:
    """One layer, or several equal ones, as a stage with its inputs."""

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
            hasattr(module, "grad_queue") for module in self._stage.layers.modules()
        )

    def seconds(
        self, make_update: Callable[[nn.Module], Update], synchronize: Synchronize, least_s: float
    ) -> dict[str, float]:
        """Returns mean seconds of forward, recompute, backward, deferred weight gradients and update, and the rounds'
        spread."""
        update = make_update(self._stage.layers)
        rounds: list[tuple[float, ...]] = []
        deadline_s = time.perf_counter() + least_s
        with self._stage.weights_cast_once():
            while synchronize(len(rounds) < WARM_UPS + LEAST_ROUNDS or time.perf_counter() < deadline_s):
                rounds.append(self._round(update))
        names = ("forward_s", "recompute_s", "backward_s", "weight_grad_s", "update_s")
        columns = zip(*rounds[WARM_UPS:], strict=True)
        count = len(self._stage.layers)
        means = {name: _ordinary_mean(column) / count for name, column in zip(names, columns, strict=True)}
        lower, _, upper = statistics.quantiles(map(sum, rounds[WARM_UPS:]), n=4)
        return means | {"relative_spread": upper / lower if lower else 1.0}  # 0: below the clock's resolution

    def bytes(self, make_update: Callable[[nn.Module], Update]) -> dict[str, int]:
        """Returns the sizes of a ``LayerCost``; gradients and optimizer state are allocated beforehand."""
        device, update = self._stage.device, make_update(self._stage.layers)
        self._backward(*self._recomputed(), [])
        update()
        for parameter in trainable(self._stage.layers):
            parameter.grad = torch.zeros_like(parameter)
        with self._stage.weights_cast_once():
            with MemoryTracker(device) as first:
                self._forward()
            with MemoryTracker(device) as forward:
                self._forward()
            saved = self._new_micro_batch()
            with MemoryTracker(device) as graph:
                outputs = self._graph(saved)[0]  # all of them, also those without a gradient
            del outputs
            gradients = self._gradients(saved)
            with MemoryTracker(device) as backward:
                self._backward(saved, gradients, [])
        with MemoryTracker(device) as updating:
            update()
        return {
            "parameters": sum(parameter.numel() for parameter in self._stage.layers.parameters()),
            "frozen": frozen_values(self._stage.layers),
            "recorded_bytes": sum(map(recorded_bytes, self._stage.layers)),
            "cast_bytes": first.change - forward.change,
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
            with MemoryTracker(self._stage.device) as standing:
                saved, gradients = self._recomputed()
                self._backward(saved, gradients, deferred)
                del saved, gradients
        return standing.change

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
        backward = self._time(lambda: [self._backward(*pair, deferred) for pair in zip(saved, gradients, strict=True)])
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
