"""Token and position embeddings: the first layer of each stack. Both share one vocabulary matrix."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.fused_norm import LayerNorm
from models.shape import BEGIN, END, PADDING, BlockShape, TransformerShape
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


def sentences(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sentence of each place in its row, counted from 1, int32, and its position in the sentence, int64.

    ``starts`` (batch, time) bool is True where a sentence begins; the first one always begins at the first place.

        starts     0 0 0 1 0 1 0 0
        sentence   1 1 1 2 2 3 3 3
        position   0 1 2 0 1 0 1 2
    """
    places = torch.arange(starts.shape[1], device=starts.device)
    return 1 + starts.cumsum(1, dtype=torch.int32), places - torch.where(starts, places, 0).cummax(1).values


class TokenEmbedding(nn.Module):
    """A vocabulary matrix (vocabulary, width), starting with deviation width^-0.5 and read times sqrt(width), so that
    an embedded token has unit variance."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.width, self.dropout = shape.width, shape.dropout
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.width))

    def embed(self, ids: Tensor, start: int = 0, positions: Tensor | None = None) -> Tensor:
        """(batch, time) int64 -> (batch, time, width), at positions from ``start`` on, or at these (batch, time)."""
        tokens = F.embedding(ids, self.weight)
        vectors = sinusoids(ids.shape[1], self.width, tokens, start)
        if positions is not None:
            vectors = F.embedding(positions, vectors)
        return F.dropout(torch.add(vectors, tokens, alpha=math.sqrt(self.width)), self.dropout, self.training)

    def reset_parameters(self) -> None:
        """Initialises the matrix. Layers that share it get the values of the first."""
        nn.init.normal_(self.weight, std=self.width**-0.5)


class SourceEmbedding(TokenEmbedding):
    """Layer 0. Turns source ids into vectors, and numbers the sentences of each row for all attention."""

    gpipe_ties: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        self.reset_parameters()

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """source (batch, S) and target (batch, T), int64 -> x (batch, S, width), sentence (batch, S) int32, target.

        A row has one or several sentences, each with ``END`` after it. ``sentence`` counts them from 1; it is 0 at
        padding.
        """
        starts = F.pad(source[:, :-1] == END, (1, 0))
        sentence, positions = sentences(starts)
        return self.embed(source, positions=positions), sentence.masked_fill(source == PADDING, 0), target


class TargetEmbedding(TokenEmbedding):
    """The layer between the stacks: ends the encoder with its last LayerNorm and begins the decoder.

    In each row the first target sentence translates the first source sentence, and so on.
    """

    gpipe_ties: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        self.memory_norm = LayerNorm(shape.width)
        self.reset_parameters()

    def forward(self, x: Tensor, sentence: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (batch, S, width), sentence (batch, S), target (batch, T) -> y (batch, T, width), memory like x, sentence
        (batch, S + T): that of each source place and of each target place, in one tensor, which is one message.

        Target padding counts to the sentence at the first source place: a softmax over nothing would be NaN.
        """
        own, positions = sentences(F.pad(target[:, 1:] == BEGIN, (1, 0)))
        own = torch.where(target == PADDING, sentence[:, :1], own)
        return self.embed(target, positions=positions), self.memory_norm(x), torch.cat((sentence, own), dim=1)

    def prefill(self, x: Tensor, sentence: Tensor, target: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], LayerCache]:
        """As ``forward``; the cache holds the number of positions."""
        return self(x, sentence, target), LayerCache(positions=target.shape[1])

    def decode_step(self, cache: LayerCache, target: Tensor) -> tuple[Tensor]:
        """target (rows, 1) -> y (rows, 1, width), at the next position."""
        y = self.embed(target, cache.positions)
        cache.positions += target.shape[1]
        return (y,)

    def reset_parameters(self) -> None:
        """The shared matrix as in the source's embedding; the norm starts as the plain one."""
        super().reset_parameters()
        self.memory_norm.reset_parameters()
