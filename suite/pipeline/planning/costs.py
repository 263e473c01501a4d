"""The cost of one layer for one micro-batch: seconds and bytes, measured on a device or estimated for one.

    alive          forward (no graph)      recompute (graph)         backward
    bytes               /\\  forward_peak       __/\\ graph_peak     /\\ backward_peak
      ^            ____/  \\__ outputs      ___/    \\_ activations _/  \
      |   inputs__/                  inputs                            \\__ gradients of the inputs

Peaks are relative to what was allocated before: the layer's inputs, and for a backward its activations and output
gradient. So the peaks of a cell follow from those of its layers (``suite.pipeline.planning.memory``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from suite.errors import SettingError


@dataclass(frozen=True, slots=True)
class SkipInput:
    """A skip that a layer pops (``suite.pipeline.runtime.skip``); sizes in bytes."""

    span: int
    """It is stashed this many layers before."""
    bytes: int
    gradient_bytes: int
    same_as_output: bool
    """Whether it is also an output that the layer behind the stashing one gets."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer and one micro-batch; times in seconds, sizes in bytes; ``parameters`` and ``frozen`` count values."""

    forward_s: float
    """Without a graph."""
    recompute_s: float
    """With a graph: a recompute, or the forward of a micro-batch that is not recomputed."""
    backward_s: float
    update_s: float
    """Its share of the update at the end of a mini-batch."""
    parameters: int
    boundary_bytes: int
    """Its inputs and the open skips of later layers, each tensor once: what a stage that begins here receives and
    saves of each micro-batch."""
    gradient_bytes: int
    """Their gradients: what a stage that begins here sends back."""
    activation_bytes: int
    """Alive after a forward with graph: outputs and tensors saved for the backward, not the inputs."""
    forward_peak_bytes: int
    graph_peak_bytes: int
    backward_peak_bytes: int
    """Without the parameters' gradients, which are always allocated."""
    update_peak_bytes: int
    """Temporary bytes of its update."""
    weight_grad_s: float = 0.0
    """The part of the backward that can be deferred (``suite.pipeline.runtime.weight_grad``)."""
    split_s: float = 0.0
    """What splitting the backward costs extra."""
    deferred_bytes: int = 0
    """Alive between the backward of the inputs and that of the weights."""
    frozen: int = 0
    """Of ``parameters``, the values that are not trained: they have no gradient and no optimizer state."""
    state_bytes: int = 0
    """Optimizer state that is not proportional to its parameters: Adafactor's rows and columns."""
    cast_bytes: int = 0
    """Copies of its weights in bf16, made once a mini-batch (``Stage.weights_cast_once``). Their time is not
    counted: it is less than that of the update."""
    recorded_bytes: int = 0
    """What its norms record of each micro-batch until the mini-batch ends (``suite.pipeline.model.batchnorm``)."""
    skip_inputs: tuple[SkipInput, ...] = ()
    relative_spread: float = 1.0
    """Upper over lower quartile of the measured rounds' seconds: how much other work disturbed them."""

    @property
    def seconds(self) -> float:
        """Forward, recompute and backward."""
        return self.forward_s + self.recompute_s + self.backward_s


def check_costs(costs: Sequence[LayerCost]) -> None:
    """Raises SettingError, with every fault, when a number in a cost is negative or not finite."""
    faults = []
    for index, cost in enumerate(costs):
        numbers = asdict(cost)
        for at, popped in enumerate(numbers.pop("skip_inputs")):
            numbers |= {f"pops {at}, {name}": value for name, value in popped.items()}
        bad = [f"{name} = {value}" for name, value in numbers.items() if not math.isfinite(value) or value < 0]
        if bad:
            faults.append(f"layer {index} has {', '.join(bad)}")
        far = [popped.span for popped in cost.skip_inputs if not 0 < popped.span <= index]
        if far:
            faults.append(f"layer {index} pops skips that were stashed {', '.join(map(str, far))} layers before it")
    if faults:
        raise SettingError(
            f"a plan needs costs whose numbers are finite and not negative; {'; '.join(faults)}; "
            "measure or estimate them again"
        )
