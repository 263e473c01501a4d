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

from torch import Tensor, nn

from models.blocks import FeedForward, ResidualBlock, SelfAttention
from models.chunked_loss import ChunkedHead
from models.embedding import TokenEmbedding
from models.fused_norm import LayerNorm
from models.shape import LanguageModelShape
from suite.decoding.kv_cache import LayerCache


def layers(shape: LanguageModelShape) -> list[nn.Module]:
    """Returns the ``shape.list_length`` layers in order; under ``torch.device("meta")`` they cost no memory."""
    return [Embedding(shape), *(Block(shape) for _ in range(shape.blocks_per_stack)), Head(shape)]


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


class Block(ResidualBlock):
    """Causal self-attention, then feed-forward."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__(shape)
        self.attention_norm = LayerNorm(shape.width)
        self.attention = SelfAttention(shape, causal=True)
        self.feed_norm = LayerNorm(shape.width)
        self.feed = FeedForward(shape)
        _fill(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width). Padding is at the right end, so it needs no mask."""
        rows = x.flatten(0, 1)
        mixed = self.attention(self.attention_norm(rows), x.shape[1])
        rows, normed = self.add_and_norm(rows, mixed, self.feed_norm)
        return self.add(rows, self.feed(normed)).view_as(x)

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


class Head(ChunkedHead):
    """Nothing is normalised before the projection, and no logit is clipped."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__(shape, nn.Identity(), clip=None)
        _fill(self)


def _fill(layer: Embedding | Block | Head) -> None:
    """Initialises a new layer, but not on the meta device, where it would take a third of the time to create the
    paper's 1665 layers."""
    if not next(layer.parameters()).is_meta:
        layer.reset_parameters()
