"""Transformer-L, the language model of section 3 of the GPipe paper (Tables 1 to 3), as a plain list of layers.

    embedding, L blocks, head

Each block is pre-LayerNorm causal self-attention, then feed-forward: x + dropout(branch(norm(x))). The paper gives
the numbers of a layer and the sizes of whole models, but no formula. The sizes match with biases everywhere in a block,
no LayerNorm after the last one, a softmax with bias that is untied from the embedding, and positions that are not
learned. At H = 4d, as in the paper, the trainable values are

    L * (12d^2 + 13d)  +  2Vd + V

The loss is ``models.loss.TranslationLoss(label_smoothing=0.0)``: negative log likelihood, summed over the tokens that
are not padding (id 0). The label of a position is the next id; the code that makes the batch shifts them.
"""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from annotated_types import Unit
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from models.blocks import FeedForward, SelfAttention, reset_linear
from models.chunked_loss import ChunkedHead, linear_cross_entropy
from models.embedding import TokenEmbedding
from models.shape import NUMBERS, Count, Even, Scale, Share, output_scale
from suite.decoding.kv_cache import LayerCache

__all__ = ["Block", "Embedding", "Head", "LanguageModelShape", "layers"]


@dataclass(frozen=True, config=NUMBERS)
class LanguageModelShape:
    """A Transformer-L; the defaults are the paper's (section 3), which names no dropout."""

    layers: Count
    """L: blocks."""
    width: Even = 2048
    """Width of the model."""
    feed_forward: Count = 8192
    """Width of the feed-forward layers."""
    heads: Count = 32
    """Attention heads, which divide the width."""
    vocabulary: Annotated[Count, Unit("tokens")] = 32_000
    """Follows text.vocabulary."""
    time: Annotated[Count, Unit("tokens")] = 1024
    """Follows text.length."""
    dropout: Share = 0.0
    """Dropout probability."""
    residual_scale: Scale = None
    """Output matrices of blocks start and learn times this / (2 x layers); none: they start divided by model.layers."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must divide the width, {self.width}, evenly, which {self.heads} does not")

    @property
    def output_scales(self) -> tuple[float, float]:
        """Factors of the start of the output matrices of attention and of feed-forward blocks.

        Feed-forward starts as in the Transformer of section 5, and attention too: there a last LayerNorm bounds the
        input of the softmax. Here there is none, and with L plain attentions the residual stream and the initial logits
        would grow as sqrt(L).
        """
        scale = output_scale(self) or 1 / self.layers
        return scale, scale

    @property
    def head_width(self) -> int:
        """Columns of one head."""
        return self.width // self.heads

    @property
    def attention_width(self) -> int:
        """Columns of all heads together: the width."""
        return self.width

    @property
    def list_length(self) -> int:
        """Length of the layer list: the blocks, the embedding before and the head after them."""
        return self.layers + 2


def layers(shape: LanguageModelShape) -> list[nn.Module]:
    """Returns the ``shape.list_length`` layers in order; under ``torch.device("meta")`` they cost no memory."""
    return [Embedding(shape), *(Block(shape) for _ in range(shape.layers)), Head(shape)]


class Embedding(TokenEmbedding):
    """The vocabulary matrix, tied to no other layer."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__(shape)
        _fill(self)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, time) int64 -> x (batch, time, width)."""
        return self.embed(ids)

    def prefill(self, ids: Tensor) -> tuple[tuple[Tensor], LayerCache]:
        """As ``forward``; the cache holds the number of positions."""
        return (self(ids),), LayerCache(positions=ids.shape[1])

    def decode_step(self, cache: LayerCache, ids: Tensor) -> tuple[Tensor]:
        """ids (rows, 1) -> x (rows, 1, width), at the next position."""
        x = self.embed(ids, cache.positions)
        cache.positions += ids.shape[1]
        return (x,)


class Block(nn.Module):
    """Causal self-attention, then feed-forward."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape, causal=True)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.feed = FeedForward(shape)
        _fill(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width). Padding is at the right end, so it needs no mask."""
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        return x + F.dropout(self.feed(self.feed_norm(x)), self.dropout, self.training)

    def prefill(self, x: Tensor) -> tuple[tuple[Tensor], LayerCache]:
        """As ``forward``; the cache holds the keys and values of the positions."""
        mixed, seen = self.attention.prefill(self.attention_norm(x))
        x = x + mixed
        return (x + self.feed(self.feed_norm(x)),), LayerCache(by_hypothesis=seen)

    def decode_step(self, cache: LayerCache, x: Tensor) -> tuple[Tensor]:
        """x (rows, 1, width) of the next position -> the same shape."""
        mixed, cache.by_hypothesis = self.attention.decode_step(self.attention_norm(x), *cache.by_hypothesis)
        x = x + mixed
        return (x + self.feed(self.feed_norm(x)),)

    def reset_parameters(self) -> None:
        """Initialises all parameters, block by block."""
        for part in (self.attention_norm, self.attention, self.feed_norm, self.feed):
            part.reset_parameters()


class Head(ChunkedHead):
    """The softmax's projection, with bias; nothing is normalised before it and no logit is clipped."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.project = nn.Linear(shape.width, shape.vocabulary)
        _fill(self)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, time, width) -> logits (batch, time, vocabulary)."""
        logits: Tensor = self.project(x)
        return logits

    def score(self, loss: nn.Module, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Returns ``loss(self(*inputs), *targets)`` without materializing large logits."""
        return linear_cross_entropy(inputs[0], self.project, None, loss, targets[0], self.logits_bytes)

    def prefill(self, x: Tensor) -> tuple[tuple[Tensor], LayerCache]:
        """x (batch, time, width) -> logits of the last position (batch, vocabulary)."""
        return (self(x[:, -1]),), LayerCache()

    def decode_step(self, cache: LayerCache, x: Tensor) -> tuple[Tensor]:
        """x (rows, 1, width) -> logits (rows, vocabulary)."""
        return (self(x[:, -1]),)

    def reset_parameters(self) -> None:
        """Glorot-uniform, so the initial distribution is nearly uniform; bias zero."""
        reset_linear(self.project)


def _fill(layer: Embedding | Block | Head) -> None:
    """Initialises a new layer, but not on the meta device, where it would take a third of the time to create the
    paper's 1665 layers."""
    if not next(layer.parameters()).is_meta:
        layer.reset_parameters()
