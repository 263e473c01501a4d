"""Writing a token at a time: what was computed of the positions before is kept, layer by layer, and not computed again.

    layers          0 1 2 3 | 4 5 6 7          a model that writes: its last layers have ``begin`` and ``extend``,
    begin           x x x x   x x x x          from the first of them, the entry, on
    extend                    x x x x          only these run again, on the newest position alone
    extend                    x x x x

``begin(*inputs) -> (outputs, cache)``
    what ``forward`` does on the first positions, and what the layer keeps of them;
``extend(cache, *inputs) -> outputs``
    what ``forward`` would return at the next position; the cache takes it in. The entry gets the new tokens' ids
    (rows, 1), each later layer what the one before returns.

The last layer returns the logits of the last position, (rows, vocabulary). Rows are hypotheses: those of one sentence
lie side by side and are equally many for all sentences of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.boundary import narrowed
from suite.pipeline.layers import Tensors, as_tuple


@dataclass
class Cache:
    """What a layer keeps of a group."""

    rows: Tensors = ()
    """Tensors with a row for each hypothesis."""
    sentences: Tensors = ()
    """Tensors with a row for each sentence, whatever its hypotheses."""
    time: int = 0
    """Positions seen, for a layer that asks."""


@dataclass(frozen=True)
class Move:
    """How a group goes on: which sentences stay, which hypotheses of them, each with its next token.

    parents    [[0, 0, 1], [2, 0, 1]]     2 sentences stay, 3 hypotheses each; the second one's first goes on from its
    tokens     [[9, 4, 4], [7, 7, 3]]     third, with the token 7
    """

    kept: Tensor
    """(sentences,) int64: places among the sentences before."""
    parents: Tensor
    """(sentences, hypotheses) int64: places among the hypotheses of the same sentence before."""
    tokens: Tensor
    """(sentences, hypotheses) int64."""

    @property
    def over(self) -> bool:
        """Whether no sentence is left."""
        return self.kept.numel() == 0

    def to(self, device: torch.device) -> Move:
        """Returns it on a device."""
        return Move(self.kept.to(device), self.parents.to(device), self.tokens.to(device))

    def apply(self, caches: Iterable[Cache], sentences: int, hypotheses: int) -> None:
        """Puts caches of so many sentences and hypotheses of each in the order of what goes on."""
        rows = (self.kept[:, None] * hypotheses + self.parents).flatten()
        moved = not torch.equal(rows, torch.arange(sentences * hypotheses, device=rows.device))
        for cache in caches:
            if moved:
                cache.rows = tuple(tensor.index_select(0, rows) for tensor in cache.rows)
            if len(self.kept) != sentences:
                cache.sentences = tuple(tensor.index_select(0, self.kept) for tensor in cache.sentences)


def entry(layers: Sequence[nn.Module]) -> int:
    """Returns the index of the first layer that extends; all after it must. Raises SettingError where none does."""
    able = [hasattr(layer, "extend") for layer in layers]
    first = next((at for at, one in enumerate(able) if one), len(able))
    if first == len(able) or not all(able[first:]):
        raise SettingError(f"a model that ends with {type(layers[-1]).__name__} writes no text; take one that does")
    return first


class Part:
    """Consecutive layers of a model, from ``first`` on, that write: those of one stage, or all."""

    def __init__(self, layers: Sequence[nn.Module], first: int, entry: int, device: torch.device, mixed: bool) -> None:
        """``mixed`` computes under bf16 autocast, as training did."""
        self._device, self._mixed = device, mixed
        before = max(0, entry - first)
        self._once, self._again = layers[:before], layers[before:]
        for layer in layers:
            layer.eval()

    @torch.inference_mode()
    def begin(self, inputs: Tensors) -> tuple[Tensors, list[Cache]]:
        """Runs all layers on the first positions; returns the last one's outputs, and what each that extends keeps."""
        caches: list[Cache] = []
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
            for layer in self._once:
                inputs = self._between(as_tuple(layer(*inputs)))
            for layer in self._again:
                outputs, cache = layer.begin(*inputs)  # type: ignore[operator]
                inputs = self._between(outputs)
                caches.append(cache)
        return inputs, caches

    @torch.inference_mode()
    def extend(self, caches: Sequence[Cache], inputs: Tensors) -> Tensors:
        """Runs the layers that extend on one more position."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
            for layer, cache in zip(self._again, caches, strict=True):
                inputs = self._between(layer.extend(cache, *inputs))  # type: ignore[operator]
        return inputs

    def _between(self, tensors: Tensors) -> Tensors:
        return narrowed(tensors) if self._mixed else tensors
