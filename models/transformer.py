"""T(L, H, A), the multilingual Transformer of section 5 of the GPipe paper, as a plain list of layers.

    source embedding, L encoder layers, target embedding, L decoder layers, head

Every layer's inputs are exactly the previous layer's outputs, ids included, so any partition of the list is a pipeline.
A row may have several sentences, one after the other (packing); attention stays within a sentence.
Pre-LayerNorm: x + dropout(branch(norm(x))). All projections have biases, each stack ends with a LayerNorm, and the
softmax is untied from the shared embedding. With w = 64A the trainable values are

    L * (12dw + 4dH + 9w + 2H + 15d)  +  4d  +  2Vd + V

which meets the paper's sizes (408,209,920 for T(6, 8192, 16) at d = 1024, V = 64000).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from models.blocks import CrossAttention, FeedForward, ResidualBlock, SelfAttention
from models.chunked_loss import ChunkedHead
from models.embedding import SourceEmbedding, TargetEmbedding
from models.fused_norm import LayerNorm
from models.masks import mask, same_sentence, source_to_source, target_to_source, target_to_target
from models.shape import TransformerShape
from suite.decoding.kv_cache import LayerCache


def layers(shape: TransformerShape) -> list[nn.Module]:
    """Returns the ``shape.list_length`` layers in order; under ``torch.device("meta")`` they cost no memory."""
    encoder = [EncoderLayer(shape) for _ in range(shape.blocks_per_stack)]
    decoder = [DecoderLayer(shape) for _ in range(shape.blocks_per_stack)]
    return [SourceEmbedding(shape), *encoder, TargetEmbedding(shape), *decoder, Head(shape)]


class EncoderLayer(ResidualBlock):
    """Self-attention over the source, then feed-forward."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        self.attention_norm = LayerNorm(shape.width)
        self.attention = SelfAttention(shape, causal=False)
        self.feed_norm = LayerNorm(shape.width)
        self.feed = FeedForward(shape)
        self.reset_parameters()

    def forward(self, x: Tensor, sentence: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (batch, S, width), sentence (batch, S) int32, target (batch, T) int64 -> the same three, x changed."""
        rows, time = x.flatten(0, 1), x.shape[1]
        own = partial(mask, source_to_source, sentence, time)
        rows, normed = self.add_and_norm(rows, self.attention(self.attention_norm(rows), time, own), self.feed_norm)
        return self.add(rows, self.feed(normed)).view_as(x), sentence, target


class DecoderLayer(ResidualBlock):
    """Causal self-attention over the target, attention over the encoder's output, then feed-forward."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape)
        self.attention_norm = LayerNorm(shape.width)
        self.attention = SelfAttention(shape, causal=True)
        self.source_norm = LayerNorm(shape.width)
        self.source = CrossAttention(shape)
        self.feed_norm = LayerNorm(shape.width)
        self.feed = FeedForward(shape)
        self.reset_parameters()

    def forward(self, y: Tensor, memory: Tensor, sentence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y (batch, T, width), memory (batch, S, width), sentence (batch, S + T) int32 -> the same three, y changed."""
        rows, time, sources = y.flatten(0, 1), y.shape[1], memory.shape[1]
        own, to_source = (partial(mask, rule, sentence, sources) for rule in (target_to_target, target_to_source))
        rows, normed = self.add_and_norm(rows, self.attention(self.attention_norm(rows), time, own), self.source_norm)
        rows, normed = self.add_and_norm(rows, self.source(normed, memory, to_source), self.feed_norm)
        return self.add(rows, self.feed(normed)).view_as(y), memory, sentence

    def prefill(self, y: Tensor, memory: Tensor, sentence: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], LayerCache]:
        """As ``forward`` of rows with one sentence; caches the keys and values of the positions, and those of the
        source."""
        mixed, seen = self.attention.prefill(self.attention_norm(y))
        source = sentence[:, : memory.shape[1]]
        visible = same_sentence(source[:, :1], source)[:, None]
        cache = LayerCache(by_hypothesis=seen, by_sentence=(*self.source.project_memory(memory), visible))
        return (self._after_attention(y + mixed, cache), memory, sentence), cache

    def decode_step(self, cache: LayerCache, y: Tensor) -> tuple[Tensor]:
        """y (rows, 1, width), the rows of one sentence adjacent -> the same, y changed."""
        mixed, cache.by_hypothesis = self.attention.decode_step(self.attention_norm(y), *cache.by_hypothesis)
        return (self._after_attention(y + mixed, cache),)

    def _after_attention(self, y: Tensor, cache: LayerCache) -> Tensor:
        y = y + self.source.attend(self.source_norm(y), *cache.by_sentence).view_as(y)
        return y + self.feed(self.feed_norm(y))


class Head(ChunkedHead):
    """The decoder's last LayerNorm and the softmax projection, with clipped logits.

    The paper (section 5) clips a logit whenever its magnitude exceeds a bound. So the bound is hard: the identity below
    it, no gradient beyond it; a tanh would change every logit. The paper does not give the value. With label smoothing
    e the best logits differ by ln((1-e)V/e), 13.3 at e = 0.1 and V = 64000. The default range, -30 to 30, is more than
    four times as wide and so matters only where training diverges.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape, LayerNorm(shape.width), shape.logit_clip)
        self.reset_parameters()
