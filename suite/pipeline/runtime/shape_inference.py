"""Infers the shapes of the tensors between layers by running the layers on tensors without values.

Results are cached by layer structure and input specs: of a stack of equal layers only the first runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.pipeline.model.layer_copy import copied
from suite.pipeline.model.layers import Tensors, as_tuple, structure_key
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

    def infer_all(self, cut: CutSpec) -> list[CutSpec]:
        """Returns ``cut``, which is before the first layer, and the cut behind each layer."""
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
            cached = self._cache[key] = _run(layer, cut.main, popped, self._bf16)
        main, stashed = cached
        passing = [skip.as_own_tensor() for skip in open_skips.values()]
        new = [replace(skip, name=name) for name, skip in zip(stashes_of(layer), stashed, strict=True)]
        return CutSpec(main, (*passing, *new))


def _run(layer: nn.Module, main: Boundary, popped: Boundary, bf16: bool) -> tuple[Boundary, tuple[OpenSkip, ...]]:
    """Runs a copy of one layer, because a forward may change it; returns the next one's inputs, and the stashed skips
    without names.

    The meta device has no autocast. So a layer in bf16 is copied to fake tensors of the CPU, whose types are those of
    the CPU's autocast.
    """
    if not bf16:
        return _run_on(torch.device("meta"), copied(layer, torch.empty_like), (*main, *popped))
    torch.autocast_increment_nesting()  # an outermost context would free, at its end, the casts of all threads
    try:
        with fake_copy(layer) as own, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return _run_on(torch.device("cpu"), own, (*main, *popped), to_bf16)
    finally:
        torch.autocast_decrement_nesting()


def _run_on(
    device: torch.device, layer: nn.Module, inputs: Boundary, cast: Callable[[Tensors], Tensors] = tuple
) -> tuple[Boundary, tuple[OpenSkip, ...]]:
    tensors = [spec.empty(device).requires_grad_(spec.needs_gradient) for spec in inputs]
    before = _states()
    with torch.enable_grad():
        results, count = cast(as_tuple(layer(*tensors))), len(stashes_of(layer))
    # a layer that draws numbers may have taken a way without gradients, as one that drops itself now and then
    may_need = before != _states() and any(t.requires_grad for t in (*tensors, *layer.parameters()))

    def spec_of(tensor: Tensor) -> TensorSpec:
        spec = TensorSpec.of(tensor)
        return replace(spec, needs_gradient=spec.needs_gradient or (may_need and tensor.is_floating_point()))

    outputs = results[: len(results) - count]
    stashed = []
    for number, skip in enumerate(results[len(outputs) :], len(outputs)):
        first = next(at for at, tensor in enumerate(results) if tensor is skip)
        # of several skips that are one output, only the first counts as it (``skip.shared_as_views`` says why)
        is_first = all(tensor is not skip for tensor in results[len(outputs) : number])
        same_as_output = first if first < len(outputs) and is_first else None
        stashed.append(OpenSkip("", spec_of(skip), same_as_output))
    return tuple(map(spec_of, outputs)), tuple(stashed)


def _states() -> tuple[object, ...]:
    """Returns the states of the generators whose numbers a forward without values can read."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


@contextmanager
def fake_copy(layer: nn.Module) -> Iterator[nn.Module]:
    """A context of fake tensors on the CPU, and a copy of a meta-device layer with such tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        own = copied(layer, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        own.train()
        yield own


def inputs_of(layer: nn.Module, cut: CutSpec) -> Boundary:
    """Returns what a layer takes from the cut before it: its inputs, then the skips that it pops."""
    open_skips = {skip.name: skip.spec for skip in cut.skips}
    return cut.main + tuple(open_skips[name] for name in pops_of(layer))


def first_equals(layers: Sequence[nn.Module], cuts: Sequence[CutSpec]) -> list[int]:
    """Returns for each layer the index of the first one with the same structure and inputs; the last layer, which has
    the loss, equals no other. ``cuts`` are those of ``infer_all``."""
    first: dict[Hashable, int] = {}
    keys = [(structure_key(layer), inputs_of(layer, cut)) for layer, cut in zip(layers[:-1], cuts, strict=False)]
    return [*(first.setdefault(key, index) for index, key in enumerate(keys)), len(layers) - 1]
