"""KV-cached decoding: each layer caches what it computed of previous positions, so each step runs one position.

    layers          0 1 2 3 | 4 5 6 7          a model that generates text: its last layers have ``prefill``
    prefill         x x x x   x x x x          and ``decode_step``, from the first of them, the entry, on;
    decode_step               x x x x          then only these run, on the newest position
    decode_step               x x x x

``prefill(*inputs) -> (outputs, cache)``
    runs ``forward`` on the first positions; also returns the layer's cache of them;
``decode_step(cache, *inputs) -> outputs``
    returns what ``forward`` would return at the next position, and adds that to the cache. The entry gets the new
    tokens' ids (rows, 1), each later layer the outputs of the previous one.

The last layer returns the logits of the last position, (rows, vocabulary). Rows are hypotheses: those of one sentence
are adjacent, and every sentence of a group has the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.runtime.boundary import to_bf16


@dataclass
class LayerCache:
    """The cache of one layer for one group."""

    by_hypothesis: Tensors = ()
    """Tensors with a row for each hypothesis."""
    by_sentence: Tensors = ()
    """Tensors with a row for each sentence, shared by its hypotheses."""
    positions: int = 0
    """Number of positions so far, for layers that need it."""


@dataclass(frozen=True)
class BeamUpdate:
    """How a group continues: which sentences stay, which of their hypotheses, and the next token of each. Its tensors
    are on the host, which chooses by them what to do next.

    parents    [[0, 0, 1], [2, 0, 1]]     2 sentences stay, 3 hypotheses each; the second one's first continues its
    tokens     [[9, 4, 4], [7, 7, 3]]     third one with the token 7
    """

    kept: Tensor
    """(sentences,) int64: indices of sentences before the update."""
    parents: Tensor
    """(sentences, hypotheses) int64: indices of hypotheses of the same sentence before the update."""
    tokens: Tensor
    """(sentences, hypotheses) int64."""

    @property
    def finished(self) -> bool:
        """Whether no sentence is left."""
        return self.kept.numel() == 0

    def apply(self, caches: Iterable[LayerCache], sentences: int, hypotheses: int, device: torch.device) -> None:
        """Reorders caches on a device, of so many sentences and hypotheses of each, to match the update."""
        rows = (self.kept[:, None] * hypotheses + self.parents).flatten()
        reordered = not torch.equal(rows, torch.arange(sentences * hypotheses))
        rows, kept = (index.to(device, non_blocking=True) for index in (rows, self.kept))
        for cache in caches:
            if reordered:
                cache.by_hypothesis = tuple(tensor.index_select(0, rows) for tensor in cache.by_hypothesis)
            if len(kept) != sentences:
                cache.by_sentence = tuple(tensor.index_select(0, kept) for tensor in cache.by_sentence)


def first_cached_layer(layers: Sequence[nn.Module]) -> int:
    """Returns the index of the first cached layer; all later ones must be cached. Raises SettingError otherwise."""
    is_cached = [hasattr(layer, "decode_step") for layer in layers]
    first = next((at for at, cached in enumerate(is_cached) if cached), len(is_cached))
    if first == len(is_cached) or not all(is_cached[first:]):
        raise SettingError(f"a model that ends with {type(layers[-1]).__name__} cannot generate text; use one that can")
    return first


class CachedLayers:
    """Consecutive layers of a model, from ``first`` on, for decoding: those of one stage, or all."""

    def __init__(self, layers: Sequence[nn.Module], first: int, entry: int, device: torch.device, mixed: bool) -> None:
        """``mixed`` computes under bf16 autocast, as training did."""
        self._device, self._mixed = device, mixed
        encoder_layers = max(0, entry - first)
        self._encoder, self._decoder = layers[:encoder_layers], layers[encoder_layers:]
        for layer in layers:
            layer.eval()

    @torch.no_grad()
    def prefill(self, inputs: Tensors) -> tuple[Tensors, list[LayerCache]]:
        """Runs all layers on the first positions; returns the last one's outputs, and the caches."""
        caches: list[LayerCache] = []
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
            for layer in self._encoder:
                inputs = self._between(as_tuple(layer(*inputs)))
            for layer in self._decoder:
                outputs, cache = layer.prefill(*inputs)  # type: ignore[operator]
                inputs = self._between(outputs)
                caches.append(cache)
        return inputs, caches

    @torch.no_grad()
    def decode_step(self, caches: Sequence[LayerCache], inputs: Tensors) -> Tensors:
        """Runs the cached layers on one more position."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
            for layer, cache in zip(self._decoder, caches, strict=True):
                inputs = self._between(layer.decode_step(cache, *inputs))  # type: ignore[operator]
        return inputs

    def _between(self, tensors: Tensors) -> Tensors:
        return to_bf16(tensors) if self._mixed else tensors
