"""The branches of a Transformer block: self-attention, cross-attention and feed-forward.

Multi-head attention has a width of its own, heads * 64, independent of the model's width. In a layer activations are
rows, (batch * time, width), one for each place: products of three dimensions would be viewed as rows each time.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from models.fused_norm import LayerNorm
from models.masks import MakeMask
from models.shape import BlockShape, TransformerShape, output_scale


class SelfAttention(nn.Module):
    """Every place attends to the places of its own sentence; with ``causal``, only to those up to itself.

    Queries, keys and values come from one product, (width) -> (3 * attention width).
    """

    def __init__(self, shape: BlockShape, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.causal = shape.heads, shape.head_width, causal
        self.inward = nn.Linear(shape.width, 3 * shape.attention_width)
        self.outward = nn.Linear(shape.attention_width, shape.width)
        self.output_scale, _ = shape.output_scales

    def forward(self, x: Tensor, time: int, mask: MakeMask | None = None) -> Tensor:
        """Returns (batch * time, width) for x of that shape; ``mask`` says which places attend to which.

        Without it each row of ``time`` places is one sentence; padding is at its right end, so no token of a causal
        layer attends to it.
        """
        return self.outward(_attend(*self._parts(x, time), mask, self.causal and mask is None))

    def prefill(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As ``forward`` of a causal layer, of x (batch, time, width); returns also keys and values, (batch, heads,
        time, head width) each."""
        query, key, value = self._parts(x, x.shape[1])
        return self.outward(_attend(query, key, value, None, self.causal)).view_as(x), (key, value)

    def decode_step(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns x (batch, 1, width) mixed with the keys and values so far and its own, and these with its own."""
        query, new_key, new_value = self._parts(x, x.shape[1])
        key, value = torch.cat((key, new_key), dim=2), torch.cat((value, new_value), dim=2)
        return self.outward(_attend(query, key, value, None, causal=False)).view_as(x), (key, value)

    def _parts(self, x: Tensor, time: int) -> tuple[Tensor, Tensor, Tensor]:
        """(batch * time, width) or (batch, time, width) -> query, key, value, each (batch, heads, time, head width)."""
        joint = self.inward(x).view(-1, time, 3, self.heads, self.head_width)
        query, key, value = (part.transpose(1, 2) for part in joint.unbind(2))
        return query, key, value

    def reset_parameters(self) -> None:
        """Glorot-uniform per matrix, as if the three fused ones were separate, the output matrix times
        ``output_scale``; biases zero."""
        reset_linear(self.inward, fused=3)
        reset_linear(self.outward, scale=self.output_scale)


class CrossAttention(nn.Module):
    """Every target place attends to the source of its sentence. Keys and values come from one product."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads, self.head_width = shape.heads, shape.head_width
        self.inward = nn.Linear(shape.width, shape.attention_width)
        self.memory_inward = nn.Linear(shape.width, 2 * shape.attention_width)
        self.outward = nn.Linear(shape.attention_width, shape.width)
        self.output_scale, _ = shape.output_scales

    def forward(self, y: Tensor, memory: Tensor, mask: MakeMask) -> Tensor:
        """y (batch * target time, width), memory (batch, source time, width) -> like y."""
        return self.attend(y, *self.project_memory(memory), mask)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of memory, (batch, heads, source time, head width) each."""
        batch, time, _ = memory.shape
        joint = self.memory_inward(memory.flatten(0, 1)).view(batch, time, 2, self.heads, self.head_width)
        key, value = (part.transpose(1, 2) for part in joint.unbind(2))
        return key, value

    def attend(self, y: Tensor, key: Tensor, value: Tensor, mask: MakeMask | Tensor) -> Tensor:
        """As ``forward``, with the keys and values of memory. y may have several adjacent rows for each of
        theirs: the hypotheses of one sentence attend to it as if they were places of one row. ``mask``, then (batch, 1,
        1, source time) bool, is the same for all of them."""
        query = self.inward(y).view(len(key), -1, self.heads, self.head_width).transpose(1, 2)
        return self.outward(_attend(query, key, value, mask, causal=False))

    def reset_parameters(self) -> None:
        reset_linear(self.inward)
        reset_linear(self.memory_inward, fused=2)
        reset_linear(self.outward, scale=self.output_scale)


class ResidualBlock(nn.Module):
    """The base of blocks, whose branches add to a residual stream."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.dropout = shape.dropout

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """Returns the residual sum, the branch dropped out in training."""
        return x + self._dropped(branch)

    def add_and_norm(self, x: Tensor, branch: Tensor, norm: LayerNorm) -> tuple[Tensor, Tensor]:
        """As ``add``; returns also the sum's norm."""
        return norm.of_sum(x, self._dropped(branch))

    def _dropped(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.dropout, self.training) if self.dropout else branch

    def reset_parameters(self) -> None:
        """Initialises all parameters, branch by branch."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]


class FeedForward(nn.Module):
    """width -> H, ReLU, H -> width.

    The paper (section 5) makes deep models trainable by scaling down the initialisation of every feed-forward layer by
    the number of layers, without saying of which matrix. Here: both matrices start Glorot-uniform, and the second, the
    one that writes to the residual stream, is divided by L, the number of blocks of its stack. So the branch's output
    starts L times smaller. The sum of L independent branches then deviates by 1/sqrt(L) of what one plain branch does,
    where it would be sqrt(L): the stream does not grow with depth. The first matrix is left alone: dividing it too
    would make the output L squared times smaller (4096 at L = 64) without further use, and hold back an optimizer
    whose step follows the size of the weights (Adafactor). ``depth_scaled_init=false`` leaves both as they are,
    and ``residual_scale`` replaces the division (``models.shape.output_scale``).
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        _, self.output_scale = shape.output_scales
        self.inward = nn.Linear(shape.width, shape.feed_forward)
        self.outward = nn.Linear(shape.feed_forward, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(F.relu(self.inward(x)))

    def reset_parameters(self) -> None:
        reset_linear(self.inward)
        reset_linear(self.outward, scale=self.output_scale)


def reset_linear(linear: nn.Linear, fused: int = 1, scale: float = 1.0) -> None:
    """Fills a projection of ``fused`` matrices of equal size: Glorot-uniform for each, times ``scale``; bias zero."""
    bound = scale * math.sqrt(6 / (linear.in_features + linear.out_features // fused))
    nn.init.uniform_(linear.weight, -bound, bound)
    nn.init.zeros_(linear.bias)


def start_scale(shape: BlockShape, name: str) -> float:
    """Returns how large a parameter, such as ``3.feed.outward.weight``, starts relative to a usual one because of the
    residual scale: 1 unless it is an output matrix or its bias."""
    return (output_scale(shape) or 1.0) if ".outward." in name else 1.0


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: MakeMask | Tensor | None, causal: bool) -> Tensor:
    """(batch, heads, time, 64) three times -> (batch * query time, heads * 64)."""
    if _is_slow_in_bf16(query):
        with torch.autocast("cpu", enabled=False):
            return _attend(query.float(), key.float(), value.float(), mask, causal).to(query.dtype)
    mask = mask if mask is None or isinstance(mask, Tensor) else mask(query.dtype)
    mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
    return mixed.transpose(1, 2).reshape(-1, query.shape[1] * query.shape[3])


SHORT = 256
"""Rows of fewer places are short for ``_is_slow_in_bf16``. At 256 both ways take equally long (measured)."""


def _is_slow_in_bf16(query: Tensor) -> bool:
    """Whether attention is faster in fp32: the backward of torch's CPU kernel (2.13) takes up to five times longer in
    bf16 in short rows. Fake tensors are on the CPU too, but stand for a GPU."""
    is_on_cpu = query.is_cpu and not isinstance(query, FakeTensor)
    return is_on_cpu and query.dtype == torch.bfloat16 and query.shape[2] < SHORT
