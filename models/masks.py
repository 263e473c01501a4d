"""Masks of packed rows, each made once for all layers of a cell.

    sentence (source | target)        1 1 2 2 . | 1 1 2      padding, ., is 0
    source place 2 to the source      -inf -inf  0  0  -inf
    target place 1 to the source       0    0   -inf -inf -inf

Layers pass on the tensor of sentences itself. The masks of the last one are kept while it lives.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

MakeMask = Callable[[torch.dtype], Tensor]
"""Makes what attention adds to its scores, (batch, 1, query time, key time): 0, or -inf where a place is not seen."""

_last: list[tuple[Callable[[], Tensor | None], dict[object, Tensor]]] = [(lambda: None, {})]
"""One entry: the last tensor of sentences, and its masks. A thread whose entry was replaced still has its own masks."""


def mask(rule: Callable[[Tensor, int], Tensor], sentence: Tensor, sources: int, dtype: torch.dtype) -> Tensor:
    """Returns the mask of a rule below. ``sentence`` (batch, S) or (batch, S + T) is that of each place, in a buffer
    that no other sentences replace; ``sources`` is S."""
    of, masks = _last[0]
    if type(sentence) is not Tensor or sentence.is_inference() or torch.is_inference_mode_enabled():
        return _additive(rule(sentence, sources), dtype)  # fake; or of inference mode: no version, no graph
    if of() is not sentence:
        masks = {}
        _last[0] = weakref.ref(sentence, lambda _: masks.clear()), masks
    made_of = rule, sources, dtype, sentence._version
    if made_of in masks:
        return masks[made_of]
    made = _additive(rule(sentence, sources), dtype)
    if type(made) is Tensor:  # where shapes are inferred, it may be fake
        masks[made_of] = made
    return made


def same_sentence(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns (batch, query time, key time) bool: where both are of one sentence. Padding, 0, counts as one."""
    return queries[:, :, None] == keys[:, None, :]


def source_to_source(sentence: Tensor, sources: int) -> Tensor:
    return same_sentence(sentence[:, :sources], sentence[:, :sources])


def target_to_target(sentence: Tensor, sources: int) -> Tensor:
    return same_sentence(sentence[:, sources:], sentence[:, sources:]).tril()


def target_to_source(sentence: Tensor, sources: int) -> Tensor:
    return same_sentence(sentence[:, sources:], sentence[:, :sources])


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    seen = seen[:, None]
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)
