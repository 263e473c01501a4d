"""Packs the integers and booleans of a boundary, such as ids and masks, into one message.

    tensors of a boundary   x (bf16)   sentence (int64)   target (int64)
    messages                x          [sentence | target]

They are small, so a message costs more than its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from suite.pipeline.model.layers import Tensors
from suite.pipeline.runtime.boundary import TensorSpec


def message_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Returns the messages for tensors of these specs: those that are not packed, then one of bytes."""
    alone, packed = _divided(specs)
    size = sum(specs[at].bytes for at in packed)
    return [specs[at] for at in alone] + ([TensorSpec((size,), torch.uint8, False)] if packed else [])


def pack(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Returns the tensors as the messages of ``message_specs``."""
    alone, packed = _divided(specs)
    messages = [tensors[at].contiguous(memory_format=specs[at].layout) for at in alone]
    if packed:
        messages.append(torch.cat([tensors[at].contiguous().view(-1).view(torch.uint8) for at in packed]))
    return messages


def unpack(messages: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Tensors:
    """Reverses ``pack``; packed tensors are views of their message."""
    alone, packed = _divided(specs)
    tensors = dict(zip(alone, messages, strict=False))
    pieces = messages[-1].split([specs[at].bytes for at in packed]) if packed else ()
    for at, piece in zip(packed, pieces, strict=True):
        tensors[at] = piece.view(specs[at].dtype).view(specs[at].shape)
    return tuple(tensors[at] for at in range(len(specs)))


def _divided(specs: Sequence[TensorSpec]) -> tuple[list[int], list[int]]:
    """Returns the indices of the tensors that have a message of their own, and of those that share one. Wide types come
    first, so that each tensor begins at a multiple of its type's size."""
    packed = [at for at, spec in enumerate(specs) if not spec.dtype.is_floating_point and not spec.channels_last]
    if len(packed) < 2:
        packed = []
    alone = [at for at in range(len(specs)) if at not in packed]
    return alone, sorted(packed, key=lambda at: -specs[at].dtype.itemsize)
