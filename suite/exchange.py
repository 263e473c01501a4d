"""Exchanges small values between all workers, as JSON: a pickle, which torch's object collectives send, executes code.

gather       rank 0: a   rank 1: b   rank 2: c      all: [a, b, c]
broadcast    rank 0: a                              all: a

All workers must call them. A value may hold what JSON has, so a tuple arrives as a list.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(value: Any) -> list[Any]:
    """Returns each worker's value, by rank."""
    own = _encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()]))
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.cat([own, own.new_zeros(longest - own.numel())]))
    return [_decode(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]


def broadcast(value: Any, src: int = 0) -> Any:
    """Returns the value of rank ``src``; those of the others are ignored."""
    is_source = dist.get_rank() == src
    own = _encode(value) if is_source else torch.zeros(0, dtype=torch.uint8)
    size = torch.tensor([own.numel()])
    dist.broadcast(size, src)
    text = own if is_source else torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(text, src)
    return _decode(text)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))
