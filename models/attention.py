"""Multi-head attention with an attention width of its own: heads * 64, independent of the model's width."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from models.shape import BlockShape, TransformerShape


class SelfAttention(nn.Module):
    """Every position looks at the others of its own sentence; with ``causal``, only at those up to itself.

    Queries, keys and values come from one product, (width) -> (3 * attention width).
    """

    def __init__(self, shape: BlockShape, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.causal = shape.heads, shape.head_width, causal
        self.inward = nn.Linear(shape.width, 3 * shape.attention_width)
        self.outward = nn.Linear(shape.attention_width, shape.width)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Returns (batch, time, width) for x of that shape; ``visible`` (batch, time) is False where not to look.

        A causal layer needs no ``visible``: padding stands at the right end, so no token ever looks at it.
        """
        batch, time, _ = x.shape
        joint = self.inward(x).view(batch, time, 3, self.heads, self.head_width)
        query, key, value = (part.transpose(1, 2) for part in joint.unbind(2))
        mixed: Tensor = self.outward(_attend(query, key, value, visible, self.causal))
        return mixed

    def reset_parameters(self) -> None:
        """Glorot-uniform per matrix, as if the three fused ones stood alone; biases zero."""
        reset_linear(self.inward, fused=3)
        reset_linear(self.outward)


class CrossAttention(nn.Module):
    """Every target position looks at the source sentence. Keys and values come from one product."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads, self.head_width = shape.heads, shape.head_width
        self.inward = nn.Linear(shape.width, shape.attention_width)
        self.memory_inward = nn.Linear(shape.width, 2 * shape.attention_width)
        self.outward = nn.Linear(shape.attention_width, shape.width)

    def forward(self, y: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """y (batch, target time, width), memory (batch, source time, width), visible (batch, source time) -> like y."""
        query = self.inward(y).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)
        joint = self.memory_inward(memory).unflatten(-1, (2, self.heads, self.head_width))
        key, value = (part.transpose(1, 2) for part in joint.unbind(2))
        mixed: Tensor = self.outward(_attend(query, key, value, visible, causal=False))
        return mixed

    def reset_parameters(self) -> None:
        """As in self-attention."""
        reset_linear(self.inward)
        reset_linear(self.memory_inward, fused=2)
        reset_linear(self.outward)


def reset_linear(linear: nn.Linear, fused: int = 1, scale: float = 1.0) -> None:
    """Fills a projection of ``fused`` matrices of equal size: Glorot-uniform for each alone, times scale; bias zero."""
    bound = scale * math.sqrt(6 / (linear.in_features + linear.out_features // fused))
    nn.init.uniform_(linear.weight, -bound, bound)
    nn.init.zeros_(linear.bias)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """(batch, heads, time, 64) three times -> (batch, query time, heads * 64)."""
    mask = None if visible is None else visible[:, None, None, :]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)
