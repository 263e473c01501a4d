"""Splits sorted examples into micro-batches of even *padded* cost, so that no stage waits for an expensive one.

widths   8  8  8  8  8  8 | 16 16 16 | 24 24 | 48      cost of a part = rows x (source width + target width)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(width: int, multiple: int) -> int:
    """Returns the width rounded up to a multiple."""
    return -(-width // multiple) * multiple


def pad_to_rectangle(rows: Sequence[Sequence[int]], padding: int, width: int | None = None) -> Tensor:
    """Returns the rows as one int64 tensor (rows, width), padded at the right; the default width is the longest's."""
    width = width or max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], dtype=torch.int64)


def cut_evenly(widths: Sequence[tuple[int, int]], parts: int, multiple: int) -> list[range]:
    """Splits examples into ``min(parts, examples)`` consecutive, non-empty ranges.

    ``widths`` are (source, target) widths in tokens, which are padded to multiples. The largest cost of a range is the
    smallest possible.
    """
    count = min(parts, len(widths))
    if count == 0:
        return []
    sizes = [(padded(source, multiple), padded(target, multiple)) for source, target in widths]
    low, high = max(source + target for source, target in sizes), _cost(sizes, range(len(sizes)))
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    ranges = _filled(sizes, low)
    while len(ranges) < count:  # fewer parts already reach the smallest cost: halve the most expensive range
        heaviest = max((part for part in ranges if len(part) > 1), key=lambda part: _cost(sizes, part))
        at, half = ranges.index(heaviest), len(heaviest) // 2
        ranges[at : at + 1] = [heaviest[:half], heaviest[half:]]
    return ranges


def _cost(sizes: Sequence[tuple[int, int]], part: range) -> int:
    return len(part) * (max(sizes[i][0] for i in part) + max(sizes[i][1] for i in part))


def _filled(sizes: Sequence[tuple[int, int]], cap: int) -> list[range]:
    """Returns ranges, each filled up to the cost ``cap`` before the next one begins."""
    ranges, start, source, target = [], 0, 0, 0
    for i, (wider_source, wider_target) in enumerate(sizes):
        grown = max(source, wider_source), max(target, wider_target)
        if (i + 1 - start) * sum(grown) > cap and i > start:
            ranges.append(range(start, i))
            start, grown = i, (wider_source, wider_target)
        source, target = grown
    return [*ranges, range(start, len(sizes))]
