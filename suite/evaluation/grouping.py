"""Sentences in groups that are decoded together: sorted by length, so that little of a group is padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HYPOTHESES = 256
"""Of a group: enough to make the products of a layer large; the logits of 64,000 words are 64 MiB."""


def grouped(sources: Sequence[Sequence[int]], beam: int) -> list[list[int]]:
    """Returns the places of the sources in groups, the longest first: what comes last, and leaves stages idle, is
    short. The groups do not depend on K."""
    order = sorted(range(len(sources)), key=lambda place: -len(sources[place]))
    rows = max(1, HYPOTHESES // beam)
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def rectangle(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Returns the rows as one int64 tensor (rows, longest), padded at the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=torch.int64)
