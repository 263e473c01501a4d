"""Infers the shapes of the tensors between layers by running the layers on the meta device.

Results are cached by layer structure and input specs: of a stack of equal layers only the first runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import nn

from suite.pipeline.model.layers import as_tuple, structure_key
from suite.pipeline.runtime.boundary import Boundary, CutSpec, OpenSkip, TensorSpec, to_bf16
from suite.pipeline.runtime.skip import pops_of, stashes_of

_MAX_CACHED = 20_000
"""The most cached results: far more than the shapes of token batches, but a bound on the memory."""


class ShapeInference:
    """Infers the cuts behind consecutive meta-device layers."""

    def __init__(self, layers: Sequence[nn.Module], bf16: bool = False) -> None:
        """With ``bf16``, fp32 outputs of every layer become bf16 (``suite.pipeline.runtime.boundary.to_bf16``)."""
        self._layers, self._bf16 = layers, bf16
        self._structures = [structure_key(layer) for layer in layers]
        self._cache: dict[Hashable, tuple[Boundary, tuple[OpenSkip, ...]]] = {}

    def infer_output(self, cut: CutSpec) -> CutSpec:
        """Returns the cut behind the last layer when ``cut`` is before the first."""
        return self.infer_all(cut)[-1]

    def infer_all(self, cut: CutSpec) -> list[CutSpec]:
        """Returns ``cut`` and the cut behind each layer."""
        cuts = [cut]
        for layer, structure in zip(self._layers, self._structures, strict=True):
            cuts.append(self._infer_layer(layer, structure, cuts[-1]))
        return cuts

    def _infer_layer(self, layer: nn.Module, structure: Hashable, cut: CutSpec) -> CutSpec:
        open_skips = {skip.name: skip for skip in cut.skips}
        popped = tuple(open_skips.pop(name).spec for name in pops_of(layer))
        key = (structure, cut.main, popped)
        if len(self._cache) > _MAX_CACHED:
            self._cache.clear()
        cached = self._cache.get(key)  # another thread may call this too
        if cached is None:
            cached = self._cache[key] = _run_on_meta(layer, cut.main, popped, self._bf16)
        main, stashed = cached
        passing = [skip.as_own_tensor() for skip in open_skips.values()]
        new = [replace(skip, name=name) for name, skip in zip(stashes_of(layer), stashed, strict=True)]
        return CutSpec(main, (*passing, *new))


def _run_on_meta(
    layer: nn.Module, main: Boundary, popped: Boundary, bf16: bool
) -> tuple[Boundary, tuple[OpenSkip, ...]]:
    """Runs one layer; returns the next one's inputs, and the stashed skips without names."""
    tensors = [spec.empty(torch.device("meta")).requires_grad_(spec.needs_gradient) for spec in (*main, *popped)]
    with torch.enable_grad():
        results, count = as_tuple(layer(*tensors)), len(stashes_of(layer))
    if bf16:
        results = to_bf16(results)
    outputs = results[: len(results) - count]
    stashed = (
        OpenSkip("", TensorSpec.of(skip), next((at for at, output in enumerate(outputs) if output is skip), None))
        for skip in results[len(outputs) :]
    )
    return tuple(map(TensorSpec.of, outputs)), tuple(stashed)
