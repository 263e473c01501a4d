"""Measures what each layer costs on the device at hand: the seconds and bytes of the code that a stage runs.

Every layer is run as a stage of its own (``suite.pipeline.stage``), on the values that the layer before it returns, so
seeds, autocast and the shapes are those of a run. Layers of the same structure and the same inputs are measured once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from suite.pipeline.allocation import Allocation
from suite.pipeline.batchnorm import noted_bytes
from suite.pipeline.boundary import Front, TensorSpec
from suite.pipeline.costs import LayerCost
from suite.pipeline.fronts import Fronts, standing
from suite.pipeline.layers import Tensors, frozen_values, structure_of, trainable
from suite.pipeline.put_off import Later
from suite.pipeline.skip import Cargo, Routes, Skip, Stash, find_skips, gives_of, takes_of
from suite.pipeline.stage import Kept, Stage

Update = Callable[[], None]
Meet = Callable[[bool], bool]

WARM_UPS, LEAST_ROUNDS = 2, 5
SECONDS_A_LAYER = 0.6
"""Of measuring, for each distinct layer; at least ``LEAST_ROUNDS`` rounds of forward, rebuild, backward."""

COPIES = 8
"""Equal layers that follow one another are timed so many at once: as in a stage, one does not find its weights in a
cache and its memory just freed."""

CUDA_REPEATS = 4
"""Calls timed together on a GPU, so that the wait for it is a small part."""


@dataclass(frozen=True)
class MicroBatch:
    """What feeds the first layer, and the targets of the loss."""

    inputs: Tensors
    targets: Tensors


@dataclass(frozen=True)
class Sample:
    """Micro-batches to measure with: one whose seconds stand for all, and the one that needs the most bytes."""

    typical: MicroBatch
    largest: MicroBatch


def profile(
    layers: Sequence[nn.Module], loss: nn.Module, data: Sample, device: torch.device, precision: str,
    make_update: Callable[[nn.Module], Update], meet: Meet = bool,
) -> list[LayerCost]:  # fmt: skip
    """Returns the cost of each of the meta-device ``layers``; the loss counts to the last.

    Seconds are those of the typical micro-batch, bytes those of the largest. ``make_update`` returns what updates a
    module's parameters once. ``meet`` is called before each round with whether this process wants one, and returns
    whether there is one: where several processes will compute at once, they measure at once, because they share caches
    and memory.
    """
    typical = _walk(layers, loss, data.typical, device, precision, COPIES, lambda one: one.seconds(make_update, meet))
    largest = _walk(layers, loss, data.largest, device, precision, 1, lambda one: one.bytes(make_update))
    return [LayerCost(**seconds | sizes) for seconds, sizes in zip(typical, largest, strict=True)]


def _walk(
    layers: Sequence[nn.Module], loss: nn.Module, data: MicroBatch, device: torch.device, precision: str,
    copies: int, measure: Callable[[_Both], dict[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs a micro-batch through all layers and measures each that is unlike those before it."""
    skips, structures = find_skips(layers), [structure_of(layer) for layer in layers]
    targets = tuple(tensor.to(device) for tensor in data.targets)
    tensors = tuple(tensor.to(device) for tensor in data.inputs)
    fronts = Fronts(layers, precision == "bf16").all(Front(tuple(map(TensorSpec.of, tensors))))
    stash: Stash = {}
    known: dict[Hashable, tuple[dict[str, Any], Tensors, Tensors]] = {}
    found = []

    def lone(index: int, count: int, loss: nn.Module | None) -> _Both:
        cell = range(index, index + count)
        crossing = _crossing(skips, cell, fronts)

        def stage(splits: bool) -> _Measured:
            made = Stage(layers, [cell], loss, device, precision, seed=0, splits=splits)
            return _Measured(made, crossing, tensors, stash, targets)

        return _Both(stage)

    for index, layer in enumerate(layers):
        last = index == len(layers) - 1
        taken = tuple(TensorSpec.of(stash[name]) for name in takes_of(layer))
        key = (structures[index], fronts[index].main, taken, last)
        if key not in known:
            one = lone(index, 1, loss if last else None)
            outputs, given = one.outputs()
            alike = next((at for at in range(index, len(layers)) if structures[at] != structures[index]), len(layers))
            count = min(copies, alike - index, len(layers) - 1 - index)
            if count > 1 and _shapes(fronts[index + 1]) == _shapes(fronts[index]):  # else the next is not like it
                one = lone(index, count, None)
            known[key] = measure(one), outputs, tuple(given[name] for name in gives_of(layer))
        numbers, tensors, skipped = known[key]
        found.append(numbers | standing(fronts, skips, index))
        for name in takes_of(layer):
            del stash[name]
        stash.update(zip(gives_of(layer), skipped, strict=True))
    return found


def _shapes(front: Front) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(spec.shape, spec.dtype) for spec in front.main]


def _crossing(skips: Sequence[Skip], cell: range, fronts: Sequence[Front]) -> tuple[Cargo, Cargo | None]:
    """Returns what enters and leaves a cell when all layers before it are one stage, and all behind it another."""
    cells = [part for part in (range(cell[0]), cell, range(cell[-1] + 1, len(fronts) - 1)) if part]
    routes = Routes(skips, cells, cells.index(cell))
    leaving = routes.leaving(fronts[cell[-1] + 1]) if cell is not cells[-1] else None
    return routes.arriving(fronts[cell[0]]), leaving


class _Both:
    """One layer, or several equal ones, twice and one after the other: with its backward in one, and split."""

    def __init__(self, stage: Callable[[bool], _Measured]) -> None:
        self._stage = stage

    def outputs(self) -> tuple[Tensors, Stash]:
        """Returns what the next layer gets, and skips; each tensor says whether it carries a gradient."""
        return self._stage(False).outputs()

    def seconds(self, make_update: Callable[[nn.Module], Update], meet: Meet) -> dict[str, float]:
        """Returns means over ordinary rounds of forward, rebuild, backward and update, and what splitting changes."""
        found = self._stage(False).seconds(make_update, meet, SECONDS_A_LAYER)
        split = self._stage(True)
        if not split.puts_off:
            return found
        apart = split.seconds(make_update, meet, SECONDS_A_LAYER / 2)
        both = [sum(one[name] for name in ("rebuild_s", "backward_s", "weight_s")) for one in (found, apart)]
        weight = min(apart["weight_s"], found["backward_s"])
        return found | {"weight_s": weight, "split_s": max(0.0, both[1] - both[0])}

    def bytes(self, make_update: Callable[[nn.Module], Update]) -> dict[str, int]:
        """Returns the sizes of a ``LayerCost``; gradients and optimizer state stand already when it begins."""
        return self._stage(False).bytes(make_update) | {"put_off": self._stage(True).put_off_bytes()}


class _Measured:
    """One layer as a stage, or several equal ones, with its inputs."""

    def __init__(
        self, stage: Stage, crossing: tuple[Cargo, Cargo | None], tensors: Tensors, stash: Stash, targets: Tensors
    ) -> None:
        self._stage, self._targets = stage, targets
        self._arriving, self._leaving = crossing
        inputs = self._arriving.pack(tensors, dict(stash))
        self._inputs = tuple(tensor.detach() for tensor in inputs)
        self._objective = torch.float32
        stage.train(True)

    def outputs(self) -> tuple[Tensors, Stash]:
        """Returns what the next layer gets, and skips; each tensor says whether it carries a gradient."""
        outputs, _ = self._graph(Kept(self._inputs))
        if self._leaving is None:
            return (), {}
        free = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
        return self._leaving.unpack(free)

    @property
    def puts_off(self) -> bool:
        """Whether it has gradients that can be."""
        return self._stage.splits and any(hasattr(module, "later") for module in self._stage.layers.modules())

    def seconds(self, make_update: Callable[[nn.Module], Update], meet: Meet, least_s: float) -> dict[str, float]:
        """Returns means over ordinary rounds of forward, rebuild, backward, put-off weights' gradients and update, and
        the rounds' spread."""
        update = make_update(self._stage.layers)
        rounds: list[tuple[float, ...]] = []
        until = time.perf_counter() + least_s
        while meet(len(rounds) < WARM_UPS + LEAST_ROUNDS or time.perf_counter() < until):
            rounds.append(self._round(update))
        names = ("forward_s", "rebuild_s", "backward_s", "weight_s", "update_s")
        columns = zip(*rounds[WARM_UPS:], strict=True)
        count = len(self._stage.layers)
        means = {name: _ordinary_mean(column) / count for name, column in zip(names, columns, strict=True)}
        lower, _, upper = statistics.quantiles(map(sum, rounds[WARM_UPS:]), n=4)
        return means | {"spread": upper / lower if lower else 1.0}  # shorter than the clock can tell

    def bytes(self, make_update: Callable[[nn.Module], Update]) -> dict[str, int]:
        """Returns the sizes of a ``LayerCost``; gradients and optimizer state stand already when it begins."""
        device, update = self._stage.device, make_update(self._stage.layers)
        self._backward(*self._rebuilt(), [])
        update()
        for parameter in trainable(self._stage.layers):
            parameter.grad = torch.zeros_like(parameter)
        with Allocation(device) as forward:
            self._forward()
        kept = Kept(self._inputs)
        with Allocation(device) as graph:
            outputs = self._graph(kept)[0]  # all: one without a gradient is alive as long as the others
        del outputs
        gradients = self._gradients(kept)
        with Allocation(device) as backward:
            self._backward(kept, gradients, [])
        with Allocation(device) as updating:
            update()
        return {
            "parameters": sum(parameter.numel() for parameter in self._stage.layers.parameters()),
            "frozen": frozen_values(self._stage.layers), "noted": sum(map(noted_bytes, self._stage.layers)),
            "activations": graph.change, "forward_peak": forward.peak, "graph_peak": graph.peak,
            "backward_peak": backward.peak, "update_peak": updating.peak,
        }  # fmt: skip

    def put_off_bytes(self) -> int:
        """Returns what stands between the two parts of a backward."""
        if not self.puts_off:
            return 0
        later: list[Later] = []
        for parameter in trainable(self._stage.layers):
            parameter.grad = torch.zeros_like(parameter)
        with Allocation(self._stage.device) as standing:
            kept, gradients = self._rebuilt()
            self._backward(kept, gradients, later)
            del kept, gradients
        return max(0, standing.change)

    def _forward(self) -> Any:
        with torch.no_grad():
            return self._stage.forward(self._inputs, self._arriving, self._leaving, self._targets, 0, 0)

    def _graph(self, kept: Kept) -> tuple[Tensors, Tensor | None]:
        found = self._stage.graph(kept, self._arriving, self._leaving, self._targets, 0, 0)
        self._objective = found[0][0].dtype  # where the loss stands behind it
        return found

    def _rebuilt(self) -> tuple[Kept, Tensors]:
        kept = Kept(self._inputs)
        self._graph(kept)
        return kept, self._gradients(kept)

    def _gradients(self, kept: Kept) -> Tensors:
        """Returns a gradient for each root."""
        assert kept.roots is not None
        device = self._stage.device
        if self._leaving is None:
            return (torch.full((), 1e-3, dtype=self._objective, device=device),)
        return tuple(spec.empty(device).fill_(1e-3) for spec in self._leaving.boundary if spec.needs_gradient)

    def _backward(self, kept: Kept, gradients: Tensors, later: list[Later]) -> Tensors:
        """Runs a backward; what it puts off, where it does, is added to ``later``."""
        if not self.puts_off:
            return self._stage.backward(kept, gradients, self._arriving)
        returned, put_off = self._stage.input_backward(kept, gradients, self._arriving)
        later.append(put_off)
        return returned

    def _round(self, update: Update) -> tuple[float, ...]:
        repeats = CUDA_REPEATS if self._stage.device.type == "cuda" else 1
        kept = [Kept(self._inputs) for _ in range(repeats)]
        forward = self._time(lambda: [self._forward() for _ in kept])
        rebuild = self._time(lambda: [self._graph(one) for one in kept])
        gradients = [self._gradients(one) for one in kept]
        later: list[Later] = []
        backward = self._time(lambda: [self._backward(*pair, later) for pair in zip(kept, gradients, strict=True)])
        weight = self._time(lambda: [list(self._stage.weigh(put_off)) for put_off in later])
        later.clear()
        return *(seconds / repeats for seconds in (forward, rebuild, backward, weight)), self._time(update)

    def _time(self, what: Callable[[], Any]) -> float:
        self._synchronise()
        begin = time.perf_counter()
        what()
        self._synchronise()
        return time.perf_counter() - begin

    def _synchronise(self) -> None:
        if self._stage.device.type == "cuda":
            torch.cuda.synchronize(self._stage.device)


def _ordinary_mean(seconds: Sequence[float]) -> float:
    """Returns the mean of the rounds that no other work on the machine drew out to half as long again.

    A step is a sum of actions, so their mean counts, not their median.
    """
    bound = 1.5 * statistics.median(seconds)
    return statistics.fmean(value for value in seconds if value <= bound)
