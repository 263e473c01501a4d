"""Packs sentence pairs into rows, so that little of a mini-batch is padding, and pads rows to rectangles.

    2 rows of 16 places   source  a a a a a a a b b b b b c c c .       d d d d d d e e e e f f f . . .
                          target  a a a a a b b b b b b c c c c c       d d d d d d d e e e e f f f f f

The model keeps the sentences of a row apart (``models.transformer``). Each pair, the longest first, goes to the row
that stays the narrowest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from suite.pipeline.model.microbatch import sizes

_TOGETHER = 1024
"""Pairs that are packed together. More of them fill rows hardly better, and the time grows with their square."""


def pack(lengths: Sequence[tuple[int, int]], rows: int) -> list[list[int]]:
    """Returns ``rows`` rows, each as indices of pairs, or as many rows as pairs if there are fewer.

    ``lengths`` are the source and target tokens of each pair. Rows have similar widths.
    """
    order = sorted(range(len(lengths)), key=lambda pair: (-max(lengths[pair]), -sum(lengths[pair]), pair))
    groups = max(1, min(rows, len(order) // _TOGETHER))
    packed = []
    for group, count in enumerate(sizes(min(rows, len(order)), groups)):
        packed += _pack(lengths, order[group::groups], count)
    return packed


def _pack(lengths: Sequence[tuple[int, int]], order: Sequence[int], count: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = np.zeros((count, 2), dtype=np.int64)
    for pair in order:
        row = int((filled + lengths[pair]).max(1).argmin())
        rows[row].append(pair)
        filled[row] += lengths[pair]
    return rows


def padded(width: int, multiple: int) -> int:
    """Returns the width rounded up to a multiple."""
    return -(-width // multiple) * multiple


def pad_to_rectangle(rows: Sequence[Sequence[int]], padding: int, width: int | None = None) -> Tensor:
    """Returns the rows as one int64 tensor (rows, width), padded at the right; the default width is the longest's."""
    width = width or max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=torch.int64)
