"""Shapes of all that stands between layers, from a run without data: what arrives decides what leaves.

Remembered by layer structure and what arrives: of a stack of equal layers only the first is run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from suite.pipeline.boundary import Alive, Boundary, Front, TensorSpec, narrowed
from suite.pipeline.costs import Taken
from suite.pipeline.layers import as_tuple, structure_of
from suite.pipeline.skip import Skip, gives_of, takes_of

_REMEMBERED = 20_000
"""Results remembered at most: far more than token batches have shapes, and a bound on the memory all the same."""


class Fronts:
    """Passes fronts through consecutive meta-device layers."""

    def __init__(self, layers: Sequence[nn.Module], narrow: bool = False) -> None:
        """With ``narrow``, floats of 32 bits leave every layer as bf16 (``suite.pipeline.boundary.narrowed``)."""
        self._layers, self._narrow = layers, narrow
        self._structures = [structure_of(layer) for layer in layers]
        self._through: dict[Hashable, tuple[Boundary, tuple[Alive, ...]]] = {}

    def behind(self, front: Front) -> Front:
        """Returns the front behind the last layer when ``front`` is before the first."""
        return self.all(front)[-1]

    def all(self, front: Front) -> list[Front]:
        """Returns ``front`` and those behind each layer."""
        found = [front]
        for layer, structure in zip(self._layers, self._structures, strict=True):
            found.append(self._step(layer, structure, found[-1]))
        return found

    def _step(self, layer: nn.Module, structure: Hashable, front: Front) -> Front:
        alive = {one.name: one for one in front.skips}
        taken = tuple(alive.pop(name).spec for name in takes_of(layer))
        key = (structure, front.main, taken)
        if len(self._through) > _REMEMBERED:
            self._through.clear()
        found = self._through.get(key)  # another thread may be here too
        if found is None:
            found = self._through[key] = _run(layer, front.main, taken, self._narrow)
        main, given = found
        still = [one.apart() for one in alive.values()]
        new = [Alive(name, one.spec, one.same) for name, one in zip(gives_of(layer), given, strict=True)]
        return Front(main, (*still, *new))


def _run(layer: nn.Module, main: Boundary, taken: Boundary, narrow: bool) -> tuple[Boundary, tuple[Alive, ...]]:
    """Runs one layer; returns what the next one gets, and the skips given, without names."""
    tensors = [spec.empty(torch.device("meta")).requires_grad_(spec.needs_gradient) for spec in (*main, *taken)]
    with torch.enable_grad():
        results, count = as_tuple(layer(*tensors)), len(gives_of(layer))
    if narrow:
        results = narrowed(results)
    outputs = results[: len(results) - count]
    given = (
        Alive("", TensorSpec.of(skip), next((at for at, output in enumerate(outputs) if output is skip), None))
        for skip in results[len(outputs) :]
    )
    return tuple(map(TensorSpec.of, outputs)), tuple(given)


def standing(fronts: Sequence[Front], skips: Sequence[Skip], index: int) -> dict[str, Any]:
    """Returns what a layer's cost says of the front before it and of the skips it takes."""
    distinct = fronts[index].distinct
    taken = []
    for skip in skips:
        if skip.taker == index:
            given = next(one for one in fronts[skip.giver + 1].skips if one.name == skip.name)
            size = given.spec.bytes
            gradient = size if given.spec.needs_gradient else 0
            taken.append(Taken(index - skip.giver, size, gradient, given.same is not None))
    return {
        "boundary": sum(spec.bytes for spec in distinct),
        "gradient": sum(spec.bytes for spec in distinct if spec.needs_gradient),
        "takes": tuple(taken),
    }
