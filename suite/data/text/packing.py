"""Packs sentence pairs into rows, so that little of a mini-batch is padding, and pads rows to rectangles.

    2 rows of 16 places   source  a a a a a a a b b b b b c c c .       d d d d d d e e e e f f f . . .
                          target  a a a a a b b b b b b c c c c c       d d d d d d d e e e e f f f f f

The model keeps the sentences of a row apart (``models.transformer``). Each pair, the longest first, goes to the row
that stays the narrowest. Many pairs are packed in groups, side by side: numpy places one pair of each group at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suite.pipeline.model.microbatch import even_split_sizes

Integers = NDArray[np.int64]

_TOGETHER = 1024
"""Pairs of a group. More of them fill rows hardly better, and the time grows with their square."""

_FULL = 1 << 40
"""Tokens in a row that a group does not have: no pair goes there."""


@dataclass(frozen=True)
class Rows:
    """Pairs in rows: ``pairs`` are row after row, and row r has ``counts[r]`` of them."""

    pairs: Integers
    counts: Integers

    @cached_property
    def starts(self) -> Integers:
        """Where each row starts in ``pairs``."""
        return np.cumsum(self.counts) - self.counts

    def totals(self, lengths: Integers) -> Integers:
        """Returns the tokens of each row, (rows, ...), of those of each pair, (pairs, ...)."""
        return np.add.reduceat(lengths[self.pairs], self.starts)

    def take(self, rows: Integers) -> Rows:
        """Returns some of the rows, in this order."""
        counts = self.counts[rows]
        places = np.repeat(self.starts[rows] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return Rows(self.pairs[places], counts)


def pack(lengths: Integers, rows: int) -> Rows:
    """Returns ``rows`` rows of similar width, or as many rows as pairs if there are fewer.

    ``lengths`` are the source and target tokens of each pair, (pairs, 2).
    """
    order = np.lexsort((-lengths.sum(1), -lengths.max(1)))
    rows = min(rows, len(order))
    groups = max(1, min(rows, len(order) // _TOGETHER))  # pair i of the order is in group i % groups
    counts = np.array(even_split_sizes(rows, groups))
    first_rows = np.cumsum(counts) - counts
    filled = np.zeros((2, groups, counts.max()), dtype=np.int64)
    filled[:, np.arange(counts.max()) >= counts[:, None]] = _FULL
    row_of = np.empty(len(order), dtype=np.int64)
    for begin in range(0, len(order), groups):
        added = lengths[order[begin : begin + groups]].T
        group = np.arange(added.shape[1])
        after = filled[:, : len(group)] + added[:, :, None]
        row = np.maximum(*after).argmin(1)
        filled[:, group, row] += added
        row_of[begin : begin + groups] = first_rows[group] + row
    return Rows(order[np.argsort(row_of, kind="stable")], np.bincount(row_of))


def padded(width: Any, multiple: int) -> Any:
    """Returns a width, or an array of widths, rounded up to a multiple."""
    return -(-width // multiple) * multiple


def fill_rectangle(ids: NDArray[Any], lengths: NDArray[Any], padding: int, multiple: int) -> Tensor:
    """Returns rows of these lengths, whose ids follow each other, as one int64 tensor (rows, width), padded at the
    right. The width is the longest length, rounded up to a multiple."""
    width = padded(int(lengths.max()), multiple)
    rectangle = np.full((len(lengths), width), padding, dtype=np.int64)
    rectangle[np.arange(width) < lengths[:, None]] = ids
    return torch.from_numpy(rectangle)
