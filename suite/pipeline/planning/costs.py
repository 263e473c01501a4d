"""The cost of one layer for one micro-batch: seconds and bytes, measured on a device or estimated for one; and what its
skips add to the messages between cells.

    alive          forward (no graph)      recompute (graph)         backward
    bytes               /\\  forward_peak       __/\\ graph_peak     /\\ backward_peak
      ^            ____/  \\__ outputs      ___/    \\_ activations _/  \\
      |   inputs__/                  inputs                            \\__ gradients of the inputs

A peak is relative to what was allocated before: the layer's inputs, and for a backward its activations and the
gradients of its outputs. So the peak of a cell follows from those of its layers.

    layer   0    1    2    3    4          a skip from layer 1 to 4 passes the cuts before 2, 3 and 4;
    cut       |    |    |    |             there it leaves the stage of layer 1 and enters that of layer 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from suite.errors import SettingError
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.skip import Skip


@dataclass(frozen=True, slots=True)
class SkipInput:
    """A skip that a layer pops (``suite.pipeline.runtime.skip``); sizes in bytes."""

    span: int
    """The layer that stashes it is this many layers before."""
    bytes: int
    gradient_bytes: int
    same_as_output: bool
    """Whether the skip is also an output for the layer behind the stashing one."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer for one micro-batch; times in seconds, sizes in bytes."""

    forward_s: float
    """A forward without a graph."""
    recompute_s: float
    """A forward with a graph: a recompute, or the forward of a micro-batch that is not recomputed."""
    backward_s: float
    """The whole backward."""
    update_s: float
    """The layer's share of the update at the end of a mini-batch."""
    parameters: int
    """How many values its parameters have, with frozen ones."""
    boundary_bytes: int
    """The layer's inputs and the open skips of later layers, each tensor once: what a stage that begins here receives
    and saves of each micro-batch."""
    gradient_bytes: int
    """The gradients of the tensors in ``boundary_bytes``: what a stage that begins here sends back."""
    activation_bytes: int
    """What is alive after a forward with a graph: outputs and tensors saved for the backward, but not the inputs."""
    forward_peak_bytes: int
    """The peak of a forward without a graph."""
    graph_peak_bytes: int
    """The peak of a forward with a graph."""
    backward_peak_bytes: int
    """The peak of a backward that adds to gradients of the parameters. The first backward of a step allocates them,
    which is not counted here."""
    update_peak_bytes: int
    """The temporary bytes of the layer's update."""
    weight_grad_s: float = 0.0
    """The part of the backward that can be deferred (``suite.pipeline.runtime.weight_grad``)."""
    split_s: float = 0.0
    """The extra seconds of a backward that is split in two."""
    deferred_bytes: int = 0
    """What is alive between the backward of the inputs and that of the weights."""
    frozen: int = 0
    """How many of the values in ``parameters`` are not trained: they have no gradient and no optimizer state."""
    state_bytes: int = 0
    """Optimizer state that is not proportional to the parameters: Adafactor's rows and columns."""
    cast_bytes: int = 0
    """Copies of the weights in bf16, made once a mini-batch (``Stage.weights_cast_once``). Their time is not counted:
    it is less than that of the update."""
    recorded_bytes: int = 0
    """What norms record of each micro-batch until the mini-batch ends (``suite.pipeline.model.batchnorm``)."""
    skip_inputs: tuple[SkipInput, ...] = ()
    """The skips that the layer pops."""
    relative_spread: float = 1.0
    """Upper over lower quartile of the measured rounds' seconds: how much other work disturbed them."""
    forward_flops: int = 0
    """Model operations of a forward (``suite.pipeline.planning.flops``)."""
    backward_flops: int = 0
    """Model operations of the backward."""

    @property
    def seconds(self) -> float:
        """Forward, recompute and backward."""
        return self.forward_s + self.recompute_s + self.backward_s


def check_costs(costs: Sequence[LayerCost]) -> None:
    """Raises SettingError, with every fault, for numbers that are negative or not finite, and for impossible ones."""
    faults = []
    for index, cost in enumerate(costs):
        numbers = asdict(cost)
        for at, popped in enumerate(numbers.pop("skip_inputs")):
            numbers |= {f"pops {at}, {name}": value for name, value in popped.items()}
        bad = [f"{name} = {value}" for name, value in numbers.items() if not math.isfinite(value) or value < 0]
        if bad:
            faults.append(f"layer {index} has {', '.join(bad)}")
        elif cost.weight_grad_s > cost.backward_s:
            faults.append(f"layer {index} defers {cost.weight_grad_s} s of a backward of {cost.backward_s} s")
        far = [popped.span for popped in cost.skip_inputs if not 0 < popped.span <= index]
        if far:
            faults.append(f"layer {index} pops skips that were stashed {', '.join(map(str, far))} layers before it")
    if faults:
        raise SettingError(
            f"a plan needs costs whose numbers are finite and not negative; {'; '.join(faults)}; "
            "measure or estimate them again"
        )


@dataclass(frozen=True, slots=True)
class SkipCost:
    """A skip that passes the cuts between its layers; sizes in bytes."""

    source: int
    target: int
    bytes: int
    gradient_bytes: int
    same_as_output: bool

    def own_tensor_at(self, cut: int) -> bool:
        """Whether it is its own tensor at a cut: behind the stashing layer it may also be an output."""
        return not (self.same_as_output and self.source == cut - 1)


def skip_costs(costs: Sequence[LayerCost]) -> list[list[SkipCost]]:
    """Returns the skips that pass each cut, from the one before the first layer to the one behind the last."""
    return _skip_costs(tuple(cost.skip_inputs for cost in costs))


@lru_cache(maxsize=8)
def _skip_costs(skip_inputs: tuple[tuple[SkipInput, ...], ...]) -> list[list[SkipCost]]:
    """Cached, because each cell of a plan needs them; nobody may change them."""
    passing: list[list[SkipCost]] = [[] for _ in range(len(skip_inputs) + 1)]
    for target, inputs in enumerate(skip_inputs):
        for popped in inputs:
            skip = SkipCost(target - popped.span, target, popped.bytes, popped.gradient_bytes, popped.same_as_output)
            for cut in range(skip.source + 1, target + 1):
                passing[cut].append(skip)
    return passing


def duplicate_gradient_bytes(cut: int, skip: SkipCost) -> int:
    """The bytes of a second gradient for an output that is also a skip to another stage."""
    return skip.gradient_bytes if not skip.own_tensor_at(cut) and skip.target > cut else 0


@dataclass(frozen=True, slots=True)
class MessageCost:
    """Bytes that one cell sends to another for each micro-batch, and gets back."""

    to: int
    activation_bytes: int
    gradient_bytes: int


def message_costs(costs: Sequence[LayerCost], cells: Sequence[range], k: int) -> list[MessageCost]:
    """Returns what cell k sends, nearest cell first; the message to the next cell includes the last layer's output."""
    end = cells[k][-1] + 1
    if end == len(costs):
        return []
    cell_of = {layer: at for at, cell in enumerate(cells) for layer in cell}
    passing = skip_costs(costs)[end]
    own_tensors = [skip for skip in passing if skip.own_tensor_at(end)]
    sums = {k + 1: [costs[end].boundary_bytes, costs[end].gradient_bytes]}
    for skip in own_tensors:
        sums[k + 1][0] -= skip.bytes
        sums[k + 1][1] -= skip.gradient_bytes
    for skip in passing:
        to = cell_of[skip.target]
        if skip.source in cells[k] and (to > k + 1 or skip in own_tensors):
            entry = sums.setdefault(to, [0, 0])
            entry[0] += skip.bytes
            entry[1] += skip.gradient_bytes
    return [MessageCost(to, *sums[to]) for to in sorted(sums)]


def cut_costs(cuts: Sequence[CutSpec], skips: Sequence[Skip], index: int) -> dict[str, Any]:
    """Returns the fields of a ``LayerCost`` about the cut before a layer and the skips that it pops."""
    distinct = cuts[index].distinct_tensors
    popped = []
    for skip in skips:
        if skip.target == index:
            stashed = next(open_skip for open_skip in cuts[skip.source + 1].skips if open_skip.name == skip.name)
            size = stashed.spec.bytes
            gradient = size if stashed.spec.needs_gradient else 0
            popped.append(SkipInput(index - skip.source, size, gradient, stashed.same_as_output is not None))
    return {
        "boundary_bytes": sum(spec.bytes for spec in distinct),
        "gradient_bytes": sum(spec.bytes for spec in distinct if spec.needs_gradient),
        "skip_inputs": tuple(popped),
    }
