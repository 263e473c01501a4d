"""Cuts the layer list into K cells of consecutive layers so that the heaviest cell is as light as can be.

    costs   3 1 1 | 5 | 2 2      K = 3, heaviest cell 5

The paper minimises the variance of the cells' costs; a fill-drain step, however, is bounded below by its heaviest cell:
``sum_k(F_k+B_k) + (M-1) * max_k(F_k+B_k+R_k)``. So the heaviest cell is minimised, exactly, by dynamic programming over
(first i layers, k cells) in O(K L^2); then, among all cuts with that heaviest cell, the sum of squares, which is the
paper's variance.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from suite.errors import SettingError


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the number of layers in each of ``stages`` non-empty cells.

    Raises SettingError when there are more stages than layers or a cost is negative.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise SettingError(f"cannot cut {layers} layers into {stages} stages; use 1 to {layers} stages")
    if any(cost < 0 for cost in costs):
        raise SettingError(
            f"layer costs must not be negative; layer {min(range(layers), key=costs.__getitem__)} has {min(costs)}"
        )
    before = [0.0, *accumulate(costs)]
    heaviest, _ = _cut(before, stages, float("inf"), max, lambda cost: cost)
    _, cells = _cut(before, stages, heaviest, operator.add, lambda cost: cost * cost)
    return cells


def _cut(
    before: Sequence[float],
    stages: int,
    cap: float,
    join: Callable[[float, float], float],
    weigh: Callable[[float], float],
) -> tuple[float, list[int]]:
    """Returns the least joined weight of ``stages`` cells none of which costs more than ``cap``, and their sizes."""
    layers = len(before) - 1
    best = [0.0] + [float("inf")] * layers
    cuts: list[list[int]] = []
    for k in range(1, stages + 1):
        row, cut = [float("inf")] * (layers + 1), [k - 1] * (layers + 1)
        for i in range(k, layers + 1):
            for j in range(k - 1, i):
                cost = before[i] - before[j]
                total = join(best[j], weigh(cost)) if cost <= cap else float("inf")
                if total < row[i]:
                    row[i], cut[i] = total, j
        best = row
        cuts.append(cut)
    cells, end = [], layers
    for cut in reversed(cuts):
        cells.append(end - cut[end])
        end = cut[end]
    return best[layers], cells[::-1]


def cell_ranges(cells: Sequence[int], layers: int) -> list[range]:
    """Returns each cell's layer indices.

    Raises SettingError when the cells do not add up to the layers or one is empty.
    """
    if sum(cells) != layers or any(cell < 1 for cell in cells):
        raise SettingError(f"cells {list(cells)} hold {sum(cells)} layers, the model has {layers}; none may be empty")
    ends = list(accumulate(cells))
    return [range(end - cell, end) for end, cell in zip(ends, cells, strict=True)]
