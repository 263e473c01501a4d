"""Token and position embeddings: the first layer of each stack. Both share one vocabulary matrix."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.shape import PADDING, BlockShape, TransformerShape
from suite.decoding.kv_cache import LayerCache


def sinusoids(length: int, width: int, like: Tensor, start: int = 0) -> Tensor:
    """Returns positions from ``start`` on as (length, width), sines then cosines of wavelengths 2 pi ... 20000 pi
    ("Attention is all you need", section 3.5, with its columns in another order). Not cached: it takes a few small
    operations, for any length.
    """
    steps = torch.arange(width // 2, device=like.device, dtype=torch.float32)
    rates = torch.exp(steps * (-math.log(10_000.0) / max(width // 2 - 1, 1)))
    angles = torch.arange(start, start + length, device=like.device, dtype=torch.float32)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)


class TokenEmbedding(nn.Module):
    """A vocabulary matrix (vocabulary, width), starting with deviation width^-0.5 and read times sqrt(width), so that
    an embedded token has unit variance."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.width, self.dropout = shape.width, shape.dropout
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.width))

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        """(batch, time) int64, at positions from ``start`` on -> (batch, time, width)."""
        tokens = F.embedding(ids, self.weight)
        placed = torch.add(sinusoids(ids.shape[1], self.width, tokens, start), tokens, alpha=math.sqrt(self.width))
        return F.dropout(placed, self.dropout, self.training)

    def reset_parameters(self) -> None:
        """Initialises the matrix. Layers that share it get the owner's values."""
        nn.init.normal_(self.weight, std=self.width**-0.5)


class SourceEmbedding(TokenEmbedding):
    """Layer 0. Turns source ids into vectors and into the mask that all attention over the source uses."""

    tied: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        self.reset_parameters()

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """source (batch, S) and target (batch, T), int64 -> x (batch, S, width), mask (batch, S) bool, target.

        ``mask`` is True at tokens. In a row of only padding, which fills a batch, it is True everywhere, because a
        softmax over nothing is NaN; the loss ignores such a row. It takes an eighth of the ids' bytes.
        """
        present = source != PADDING
        mask = present | ~present.any(dim=1, keepdim=True)
        return self.embed(source), mask, target


class TargetEmbedding(TokenEmbedding):
    """The layer between the stacks: ends the encoder with its last LayerNorm and begins the decoder."""

    tied: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        self.memory_norm = nn.LayerNorm(shape.width)
        self.reset_parameters()

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (batch, S, width), mask (batch, S), target (batch, T) -> y (batch, T, width), memory like x, mask."""
        return self.embed(target), self.memory_norm(x), mask

    def prefill(self, x: Tensor, mask: Tensor, target: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], LayerCache]:
        """As ``forward``; the cache holds the number of positions."""
        return self(x, mask, target), LayerCache(positions=target.shape[1])

    def decode_step(self, cache: LayerCache, target: Tensor) -> tuple[Tensor]:
        """target (rows, 1) -> y (rows, 1, width), at the next position."""
        y = self.embed(target, cache.positions)
        cache.positions += target.shape[1]
        return (y,)

    def reset_parameters(self) -> None:
        """The shared matrix as in the source's embedding; the norm starts as the plain one."""
        super().reset_parameters()
        self.memory_norm.reset_parameters()
