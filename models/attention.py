"""Multi-head attention with an attention width of its own: heads * 64, independent of the model's width."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.shape import BlockShape, TransformerShape


class SelfAttention(nn.Module):
    """Every position attends to the positions of its own sentence; with ``causal``, only to those up to itself.

    Queries, keys and values come from one product, (width) -> (3 * attention width).
    """

    def __init__(self, shape: BlockShape, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.causal = shape.heads, shape.head_width, causal
        self.inward = nn.Linear(shape.width, 3 * shape.attention_width)
        self.outward = nn.Linear(shape.attention_width, shape.width)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Returns (batch, time, width) for x of that shape; ``visible`` (batch, time) is False at masked positions.

        A causal layer needs no ``visible``: padding is at the right end, so no token attends to it.
        """
        mixed: Tensor = self.outward(_attend(*self._parts(x), visible, self.causal))
        return mixed

    def prefill(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As ``forward`` of a causal layer; returns also keys and values, (batch, heads, time, head width) each."""
        query, key, value = self._parts(x)
        return self.outward(_attend(query, key, value, None, self.causal)), (key, value)

    def decode_step(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns x (batch, 1, width) mixed with the keys and values so far and its own, and these with its own."""
        query, new_key, new_value = self._parts(x)
        key, value = torch.cat((key, new_key), dim=2), torch.cat((value, new_value), dim=2)
        return self.outward(_attend(query, key, value, None, causal=False)), (key, value)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, time, width) -> query, key, value, (batch, heads, time, head width) each."""
        batch, time, _ = x.shape
        joint = self.inward(x).view(batch, time, 3, self.heads, self.head_width)
        query, key, value = (part.transpose(1, 2) for part in joint.unbind(2))
        return query, key, value

    def reset_parameters(self) -> None:
        """Glorot-uniform per matrix, as if the three fused ones were separate; biases zero."""
        reset_linear(self.inward, fused=3)
        reset_linear(self.outward)


class CrossAttention(nn.Module):
    """Every target position attends to the source sentence. Keys and values come from one product."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads, self.head_width = shape.heads, shape.head_width
        self.inward = nn.Linear(shape.width, shape.attention_width)
        self.memory_inward = nn.Linear(shape.width, 2 * shape.attention_width)
        self.outward = nn.Linear(shape.attention_width, shape.width)

    def forward(self, y: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """y (batch, target time, width), memory (batch, source time, width), visible (batch, source time) -> like y."""
        return self.attend(y, *self.project_memory(memory), visible)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of memory, (batch, heads, source time, head width) each."""
        joint = self.memory_inward(memory).unflatten(-1, (2, self.heads, self.head_width))
        key, value = (part.transpose(1, 2) for part in joint.unbind(2))
        return key, value

    def attend(self, y: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """As ``forward``, with the keys and values of memory. y may have several adjacent rows for each of
        theirs: the hypotheses of one sentence attend to it as if they were positions of one row."""
        query = self.inward(y).view(len(key), -1, self.heads, self.head_width).transpose(1, 2)
        mixed: Tensor = self.outward(_attend(query, key, value, visible, causal=False))
        return mixed.view_as(y)

    def reset_parameters(self) -> None:
        """As in self-attention."""
        reset_linear(self.inward)
        reset_linear(self.memory_inward, fused=2)
        reset_linear(self.outward)


def reset_linear(linear: nn.Linear, fused: int = 1, scale: float = 1.0) -> None:
    """Fills a projection of ``fused`` matrices of equal size: Glorot-uniform for each, times ``scale``; bias zero."""
    bound = scale * math.sqrt(6 / (linear.in_features + linear.out_features // fused))
    nn.init.uniform_(linear.weight, -bound, bound)
    nn.init.zeros_(linear.bias)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """(batch, heads, time, 64) three times -> (batch, query time, heads * 64)."""
    mask = None if visible is None else visible[:, None, None, :]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)
