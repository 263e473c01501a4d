"""Layers of the exported models of the GPipe suite; exported with the weights of each."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache


class Attention(nn.Module):
    """Self-attention with one product for queries, keys and values; cross-attention with one for keys and values."""

    def __init__(self, config: Any, index: int, cross: bool) -> None:
        super().__init__()
        self.heads, self.head_width = config.num_attention_heads, config.head_dim
        self.index, self.cross = index, cross
        inner = self.heads * self.head_width
        self.inward = nn.Linear(config.hidden_size, inner if cross else 3 * inner)
        if cross:
            self.memory_inward = nn.Linear(config.hidden_size, 2 * inner)
        self.outward = nn.Linear(inner, config.hidden_size)

    def _split_heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        parts = projected.unflatten(-1, (-1, self.heads, self.head_width))
        return tuple(part.transpose(1, 2) for part in parts.unbind(2))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        visible: Tensor | None = None,
        causal: bool = False,
        past: EncoderDecoderCache | Cache | None = None,
    ) -> Tensor:
        if self.cross:
            (query,) = self._split_heads(self.inward(x))
            if past is not None and past.is_updated.get(self.index):
                layer = past.cross_attention_cache.layers[self.index]
                key, value = layer.keys, layer.values
            else:
                key, value = self._split_heads(self.memory_inward(memory))
                if past is not None:
                    key, value = past.cross_attention_cache.update(key, value, self.index)
                    past.is_updated[self.index] = True
        else:
            query, key, value = self._split_heads(self.inward(x))
            if past is not None:
                key, value = getattr(past, "self_attention_cache", past).update(key, value, self.index)
        mask = None if visible is None else visible[:, None, None, :]
        if causal and key.shape[2] > 1:
            positions = torch.arange(key.shape[2], device=x.device)
            mask = positions <= positions[-query.shape[2] :, None]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.outward(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inward = nn.Linear(config.hidden_size, config.intermediate_size)
        self.outward = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(F.relu(self.inward(x)))


class Block(nn.Module):
    """Self-attention and feed-forward, each behind a LayerNorm: of an encoder, or of a language model."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config, index, cross=False)
        self.feed_norm = nn.LayerNorm(config.hidden_size)
        self.feed = FeedForward(config)

    def forward(
        self, x: Tensor, visible: Tensor | None = None, causal: bool = False, past: Cache | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), visible=visible, causal=causal, past=past)
        return x + self.feed(self.feed_norm(x))


def with_positions(tokens: Tensor, start: int) -> Tensor:
    """Returns embedded tokens (batch, time, width) at positions from ``start`` on."""
    half = tokens.shape[-1] // 2
    steps = torch.arange(half, device=tokens.device, dtype=torch.float32)
    rates = torch.exp(steps * (-math.log(10_000.0) / max(half - 1, 1)))
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device, dtype=torch.float32)
    angles = positions[:, None] * rates
    return tokens * math.sqrt(tokens.shape[-1]) + torch.cat((angles.sin(), angles.cos()), dim=1).to(tokens.dtype)
