"""What one layer costs for one micro-batch: seconds and bytes, measured on a device or estimated for one.

    alive          forward (no graph)      rebuild (graph)           backward
    bytes               /\\  forward_peak       __/\\ graph_peak     /\\ backward_peak
      ^            ____/  \\__ outputs      ___/    \\_ activations _/  \
      |   inputs__/                  inputs                            \\__ gradients of the inputs

Peaks count from what stood before the layer began: its inputs, and for a backward its activations and the gradient it
was given. So the peaks of a cell follow from those of its layers (``suite.pipeline.memory``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from suite.errors import SettingError


@dataclass(frozen=True, slots=True)
class Taken:
    """A skip that a layer takes (``suite.pipeline.skip``); sizes in bytes."""

    span: int
    """It was given so many layers before."""
    bytes: int
    gradient: int
    same: bool
    """Whether it is an output that the layer after its giver gets too."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer and one micro-batch; times in seconds, sizes in bytes but for ``parameters``, which counts values."""

    forward_s: float
    """Without a graph."""
    rebuild_s: float
    """With a graph: a rebuild, or the forward of a micro-batch that is not rebuilt."""
    backward_s: float
    update_s: float
    """Its share of the update at the end of a mini-batch."""
    parameters: int
    boundary: int
    """All that stands before it: its inputs, what a stage that begins here is sent and keeps of each micro-batch; and
    skips on their way to later layers. Each tensor once."""
    gradient: int
    """The gradients of these: what a stage that begins here sends back."""
    activations: int
    """Alive after a forward with graph: outputs and what is kept for the backward, not the inputs."""
    forward_peak: int
    graph_peak: int
    backward_peak: int
    """Without the parameters' gradients, which stand all the while."""
    update_peak: int
    """Temporary bytes of its update."""
    weight_s: float = 0.0
    """The part of the backward that can be put off (``suite.pipeline.put_off``)."""
    split_s: float = 0.0
    """What putting it off takes beside."""
    put_off: int = 0
    """Alive between the backward of the inputs and that of the weights."""
    frozen: int = 0
    """Of ``parameters``, the values that are not trained: they have no gradient and no optimizer state."""
    noted: int = 0
    """What its norms note of each micro-batch until the mini-batch ends (``suite.pipeline.batchnorm``)."""
    takes: tuple[Taken, ...] = ()
    spread: float = 1.0
    """The upper quartile of the measured rounds' seconds over the lower one: how much other work disturbed them."""

    @property
    def seconds(self) -> float:
        """Forward, rebuild and backward: what the heaviest cell is the heaviest of."""
        return self.forward_s + self.rebuild_s + self.backward_s


def check_costs(costs: Sequence[LayerCost | None], layers: int) -> None:
    """Raises SettingError, with every fault, when a cost is missing or a number in it is negative or not finite."""
    faults = [] if len(costs) == layers else [f"there are costs of {len(costs)} layers, the model has {layers}"]
    for index, cost in enumerate(costs):
        if cost is None:
            faults.append(f"layer {index} has no cost")
            continue
        numbers = asdict(cost)
        for at, taken in enumerate(numbers.pop("takes")):
            numbers |= {f"takes {at}, {name}": value for name, value in taken.items()}
        bad = [f"{name} = {value}" for name, value in numbers.items() if not math.isfinite(value) or value < 0]
        if bad:
            faults.append(f"layer {index} has {', '.join(bad)}")
        far = [taken.span for taken in cost.takes if not 0 < taken.span <= index]
        if far:
            faults.append(f"layer {index} takes skips that were given {', '.join(map(str, far))} layers before it")
    if faults:
        raise SettingError(
            f"a plan needs one cost a layer, each number finite and not negative; {'; '.join(faults)}; "
            "measure or estimate them again"
        )
