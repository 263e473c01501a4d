"""Partitions the layers into K cells of consecutive layers so that the most expensive cell is as cheap as possible.

    costs   3 1 1 | 5 | 2 2      K = 3, heaviest cell 5
    ends    3 4 4   5   6 6      ``furthest_end``: layers 0 to 2 fit a device together, 0 to 3 do not

The paper minimises the variance of the cells' costs; a fill-drain step, however, is bounded below by its heaviest cell:
``sum_k(F_k+B_k) + (M-1) * max_k(F_k+B_k+R_k)``. So the heaviest cell is minimised among the cuts in which
every cell fits, by bisection of its cost. Each test of a bound is one pass in O(K L), which finds the places where
exactly 1, 2, ... K cells can end. If a bound is feasible, the upper limit becomes the heaviest cell of the partition
found; if not, the lower limit becomes the smallest cost of a cell above the bound. Both are costs of real cells, so the
result is exact. Then single cuts are moved to make neighbouring cells more even, which ends at a local optimum of the
variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from suite.errors import PlacementError, SettingError

Costs = NDArray[np.float64]
Places = NDArray[np.intp]
Flags = NDArray[np.bool_]


def partition(costs: Sequence[float], cells: int, furthest_end: Sequence[int] | None = None) -> list[int]:
    """Returns the number of layers in each of ``cells`` non-empty cells, the most expensive as cheap as possible.

    ``costs`` has one number a layer, in any unit. ``furthest_end[j]`` is the end (exclusive) of the longest cell that
    starts at layer j and fits its device; a cell from j may end anywhere after j up to there, and nowhere if
    ``furthest_end[j]`` is j. Ends beyond the model are taken as its end. Without ``furthest_end`` every cell fits. A
    cell's cost is the difference of two prefix sums, each rounded once to float64.

    Raises SettingError when there are more cells than layers or a cost is negative or not finite, PlacementError when
    no cut fits, ValueError when ``furthest_end`` is not as long as ``costs``.
    """
    layers = len(costs)
    _check_arguments(costs, cells)
    if furthest_end is not None and len(furthest_end) != layers:
        raise ValueError(f"furthest_end has {len(furthest_end)} entries, there are {layers} layers")
    prefix = np.array([float(total) for total in accumulate(map(Fraction, map(float, costs)), initial=Fraction())])
    furthest = (
        np.full(layers, layers) if furthest_end is None else np.minimum(np.asarray(furthest_end, dtype=np.intp), layers)
    )
    cut = _lightest_ends(prefix, furthest, cells)
    if cut is None:
        raise PlacementError(f"no cut of {layers} layers into {cells} cells fits")
    return np.diff(_balance(cut, prefix, furthest)).tolist()


def with_even_stages(cells: Sequence[int], costs: Sequence[float], cell_to_stage: Sequence[int]) -> list[int]:
    """Returns the number of layers in each cell after moving single layers between neighbouring cells, as long as that
    makes stages more even: the heaviest stage lighter, or as heavy and the sum of squares less.

    ``cell_to_stage`` are the stages of the cells. A stage of several cells may be even though its cells are not.
    """

    def unevenness(ends: Sequence[int]) -> tuple[float, float]:
        loads = [0.0] * (1 + max(cell_to_stage))
        for stage, begin, end in zip(cell_to_stage, ends, ends[1:], strict=False):
            loads[stage] += prefix[end] - prefix[begin]
        return max(loads), sum(load * load for load in loads)

    prefix = [0.0, *accumulate(costs)]
    ends = [0, *accumulate(cells)]
    least, moved = unevenness(ends), True
    while moved:
        moved = False
        for at in range(1, len(ends) - 1):
            for step in (-1, 1):
                tried = [*ends[:at], ends[at] + step, *ends[at + 1 :]]
                if tried[at - 1] < tried[at] < tried[at + 1] and unevenness(tried) < least:
                    ends, least, moved = tried, unevenness(tried), True
    return [end - begin for begin, end in pairwise(ends)]


def fewest_cells(furthest_end: Sequence[int]) -> int | None:
    """Returns the fewest fitting cells that cover all layers, or None when no number of cells does.

    ``furthest_end`` is as for ``partition``. A part of a fitting cell with the same first layer fits too, so the
    layers that k cells can cover have no gaps, and each further cell is best taken from whichever of their ends
    reaches furthest.
    """
    cells = covered = furthest = 0
    for layer, end in enumerate(furthest_end):
        furthest = max(furthest, end)
        if layer == covered:
            if furthest <= layer:
                return None
            cells, covered = cells + 1, furthest
    return cells


def cell_ranges(cells: Sequence[int], layers: int) -> list[range]:
    """Returns each cell's layer indices.

    Raises SettingError, naming every fault, when the cells do not add up to the layers or one is empty or negative.
    """
    total = sum(cells)
    faults = [f"{total - layers} too many"] if total > layers else []
    faults += [f"{layers - total} left out"] if total < layers else []
    faults += [f"cell {k} has {cell}" for k, cell in enumerate(cells) if cell < 1]
    if faults:
        raise SettingError(
            f"cells {list(cells)} hold {total} layers, the model has {layers}: {', '.join(faults)}; none may be empty, "
            f"so give cells of 1 layer or more that add up to {layers}, or give none to have them computed"
        )
    ends = list(accumulate(cells))
    return [range(end - cell, end) for end, cell in zip(ends, cells, strict=True)]


def _check_arguments(costs: Sequence[float], cells: int) -> None:
    layers = len(costs)
    if not 1 <= cells <= layers:
        way_out = f"use 1 to {layers} stages" if layers else "there must be a layer"
        raise SettingError(f"cannot cut {layers} layers into {cells} stages; {way_out}")
    bad = [f"layer {j} has {cost}" for j, cost in enumerate(costs) if not (math.isfinite(cost) and cost >= 0)]
    if bad:
        raise SettingError(f"layer costs must be finite and not negative; {_first(bad, layers)}")


def _first(items: Sequence[str], layers: int, shown: int = 5) -> str:
    """Returns the first few of a list in words, with its length when some are not shown."""
    if len(items) > shown:
        return f"{', '.join(items[:shown])} and {len(items) - shown} more ({len(items)} of {layers} layers)"
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def _lightest_ends(prefix: Costs, furthest: Places, cells: int) -> list[int] | None:
    """Returns the ``cells + 1`` ends, 0 first, of a partition whose heaviest cell is the least there is, or None.

    ``prefix``, (L + 1,), are the prefix sums of the costs; ``furthest``, (L,), is ``furthest_end``.
    """
    even = _even_places(prefix, cells)
    reached = _reached(furthest, cells)
    if not reached[cells, -1]:
        return None
    cut = _nearest_ends(furthest, reached, even)
    heaviest = np.diff(prefix[cut]).max()
    least = prefix[-1] / cells
    while least < heaviest:
        # Halfway between neighbouring floats may round up to the upper one, which is known to be feasible.
        bound = min(least + (heaviest - least) / 2, np.nextafter(heaviest, 0))
        within = _ends_within(prefix, bound)
        ends = np.minimum(within, furthest)
        reached = _reached(ends, cells)
        if reached[cells, -1]:
            cut = _nearest_ends(ends, reached, even)
            heaviest = np.diff(prefix[cut]).max()
        else:
            # Every cut that fits has a cell above the bound; no such cell is lighter than the lightest there is.
            starts = np.flatnonzero(within < furthest)
            least = (prefix[within[starts] + 1] - prefix[starts]).min()
    return cut


def _ends_within(prefix: Costs, bound: float) -> Places:
    """Returns for each start, (L,), the last end of a cell whose float64 cost is at most ``bound``."""
    start = prefix[:-1]
    limit = start + bound
    # The cost is a rounded difference and the limit a rounded sum: the largest limit may be one float lower or higher.
    limit = np.where(limit - start > bound, np.nextafter(limit, 0), limit)
    above = np.nextafter(limit, np.inf)
    limit = np.where(above - start <= bound, above, limit)
    return np.searchsorted(prefix, limit, side="right") - 1


def _reached(ends: Places, cells: int) -> Flags:
    """Returns for k = 0 to ``cells`` and each place, (cells + 1, L + 1), whether exactly k cells can end there.

    A cell from j ends anywhere after j up to ``ends[j]``. Nothing is assumed of their order, so the places reached may
    have gaps, and places reached by k cells need not be reached by k + 1.
    """
    layers = len(ends)
    places = np.arange(1, layers + 1)
    reached = np.zeros((cells + 1, layers + 1), dtype=np.bool_)
    reached[0, 0] = True
    for k in range(cells):
        furthest = np.maximum.accumulate(ends * reached[k, :-1])
        np.greater_equal(furthest, places, out=reached[k + 1, 1:])
    return reached


def _even_places(prefix: Costs, cells: int) -> Costs:
    """Returns the running sum, (L + 1,), of layers measured in cells: 0 at the start and ``cells`` at the end.

    A layer above the mean cell counts as one cell and the rest share the others, so that the cells next to one huge
    layer do not get too few layers.
    """
    costs = np.diff(prefix)
    mean, heavy = prefix[-1] / cells, -1
    while heavy < (above := int(np.count_nonzero(costs > mean))) < cells:
        heavy = above
        mean = costs[costs <= mean].sum() / (cells - heavy)
    shares = np.minimum(costs, mean) / mean if mean > 0 else np.sign(costs)
    total = shares.sum()
    if total == 0:
        shares, total = np.ones_like(shares), len(shares)
    return np.concatenate(([0.0], np.cumsum(shares) * (cells / total)))


def _nearest_ends(ends: Places, reached: Flags, even: Costs) -> list[int]:
    """Returns a cut, (K + 1,) with 0 first, each end as near as it can be to its place in ``even``."""
    cells, layers = len(reached) - 1, len(ends)
    cut = [layers]
    for k in range(cells - 1, -1, -1):
        starts = np.flatnonzero(reached[k, : cut[-1]] & (ends[: cut[-1]] >= cut[-1]))
        cut.append(int(starts[np.abs(even[starts] - k).argmin()]))
    return cut[::-1]


def _balance(cut: Sequence[int], prefix: Costs, furthest: Places) -> list[int]:
    """Returns the cut after moving single cuts until no move makes its two cells more even.

    Of two cells with a given sum the squares are least when the heavier is lightest, and comparing the heavier needs no
    squares, which would round. Each move replaces two costs by two below the larger of them, so this ends, and no cell
    becomes heavier than the heaviest.
    """
    cut = list(cut)
    due: Iterable[int] = range(1, len(cut) - 1)
    while due:
        moved = [k for k in due if _shift_cut(cut, k, prefix, furthest)]
        due = sorted({beside for k in moved for beside in (k - 1, k + 1) if 0 < beside < len(cut) - 1})
    return cut


def _shift_cut(cut: list[int], k: int, prefix: Costs, furthest: Places) -> bool:
    """Moves cut ``k`` to where the heavier of its two cells is lightest; returns whether that is elsewhere."""
    start, end = cut[k - 1], cut[k + 1]
    between = slice(start + 1, min(furthest[start], end - 1) + 1)
    heavier = np.maximum(prefix[between] - prefix[start], prefix[end] - prefix[between])
    heavier[furthest[between] < end] = np.inf
    best = int(heavier.argmin())
    if heavier[best] >= heavier[cut[k] - start - 1]:
        return False
    cut[k] = start + 1 + best
    return True
