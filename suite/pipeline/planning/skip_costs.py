"""Skips in the cost model: which of them pass a cut between two layers, and the messages between cells.

layer   0    1    2    3    4          a skip from layer 1 to 4 passes the cuts before 2, 3 and 4;
cut       |    |    |    |             there it leaves the stage of layer 1 and enters that of layer 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from suite.pipeline.planning.costs import LayerCost, SkipInput
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.skip import Skip


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
