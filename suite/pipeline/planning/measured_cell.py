"""The seconds and bytes of the actions of a cell, of one layer or of several equal ones, as a stage of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from suite.device import is_host, synchronize
from suite.pipeline.model.layers import Tensors, trainable
from suite.pipeline.planning.memory_tracker import tracked_memory
from suite.pipeline.runtime.skip import CellBoundary, Stash
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.weight_grad import DeferredGrads

Update = Callable[[], None]
MakeUpdate = Callable[[nn.Module], Update]
Synchronize = Callable[[bool], bool]

WARM_UPS, LEAST_ROUNDS = 2, 5
SECONDS_A_LAYER = 0.6
"""Measuring time of each distinct layer; at least ``LEAST_ROUNDS`` rounds of forward, recompute and backward."""

DEVICE_REPEATS = 4
"""Calls timed together on a GPU, to amortise its synchronisation."""


def seconds_of(
    cell: Callable[[bool], MeasuredCell], make_update: MakeUpdate, synchronize: Synchronize
) -> dict[str, float]:
    """Returns mean seconds of a layer's forward, recompute, backward and update, and what splitting the backward
    changes. ``cell(defers)`` makes the cell with a full or a split backward."""
    whole = cell(False).seconds(make_update, synchronize)
    split_cell = cell(True)
    if not split_cell.defers:
        return whole
    split = split_cell.seconds(make_update, synchronize)
    names = ("recompute_s", "backward_s", "weight_grad_s")
    extra_s = sum(split[name] for name in names) - sum(whole[name] for name in names)
    return whole | {
        "weight_grad_s": min(split["weight_grad_s"], whole["backward_s"]),
        "split_s": max(0.0, extra_s),
    }


def bytes_of(cell: Callable[[bool], MeasuredCell], make_update: MakeUpdate) -> dict[str, int]:
    """Returns the sizes of a ``LayerCost`` that a measurement can find. One is below zero where a layer frees what it
    kept of an earlier forward."""
    return cell(False).bytes(make_update) | {"deferred_bytes": cell(True).deferred_bytes()}


class MeasuredCell:
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

    def seconds(self, make_update: MakeUpdate, synchronize: Synchronize) -> dict[str, float]:
        """Returns a layer's mean seconds of forward, recompute, backward, deferred weight gradients and update, and the
        rounds' spread."""
        update = make_update(self._stage.layers)
        rounds: list[tuple[float, ...]] = []
        deadline_s = time.perf_counter() + SECONDS_A_LAYER / (2 if self.defers else 1)
        with self._stage.weights_cast_once():
            while synchronize(len(rounds) < WARM_UPS + LEAST_ROUNDS or time.perf_counter() < deadline_s):
                rounds.append(self._round(update))
        names = ("forward_s", "recompute_s", "backward_s", "weight_grad_s", "update_s")
        columns = zip(*rounds[WARM_UPS:], strict=True)
        count = len(self._stage.layers)
        means = {name: _ordinary_mean(column) / count for name, column in zip(names, columns, strict=True)}
        lower, _, upper = statistics.quantiles(map(sum, rounds[WARM_UPS:]), n=4)
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
