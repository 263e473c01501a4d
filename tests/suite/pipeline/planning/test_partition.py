"""The exact partition against every other cut there is, and on long models."""

import random
from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from suite.errors import PlacementError, SettingError
from suite.pipeline.planning.partition import cell_ranges, fewest_cells, partition


def all_ends(layers, stages, reach=None):
    for inner in combinations(range(1, layers), stages - 1):
        ends = (0, *inner, layers)
        if reach is None or all(b <= reach[a] for a, b in pairwise(ends)):
            yield ends


def prefix_sums(costs):
    """Rounded once each; of whole numbers, not at all."""
    return [float(total) for total in accumulate(map(Fraction, costs), initial=Fraction())]


def heaviest(costs, cells):
    before = prefix_sums(costs)
    return max(before[b] - before[a] for a, b in pairwise(accumulate(cells, initial=0)))


def lightest(costs, stages, reach=None):
    """The least heaviest cell over every cut that fits, None when none does."""
    before = prefix_sums(costs)
    cuts = all_ends(len(costs), stages, reach)
    return min((max(before[b] - before[a] for a, b in pairwise(ends)) for ends in cuts), default=None)


def single_moves(ends, reach):
    """Every cut that differs in one place and fits."""
    for k in range(1, len(ends) - 1):
        for place in range(ends[k - 1] + 1, ends[k + 1]):
            if place <= reach[ends[k - 1]] and ends[k + 1] <= reach[place]:
                yield [*ends[:k], place, *ends[k + 1 :]]


def squares(before, ends):
    return sum((before[b] - before[a]) ** 2 for a, b in pairwise(ends))


def random_costs(draw, layers, kind):
    if kind == "whole":
        return [draw.randint(0, draw.choice((1, 5, 1000))) for _ in range(layers)]
    if kind == "one rounding apart":
        return [draw.choice((0.0, 2.0**-53, 1 + draw.randint(0, 3) * 2.0**-52)) for _ in range(layers)]
    return [draw.choice((0.0, draw.random(), draw.expovariate(1) ** 5)) for _ in range(layers)]


def random_reach(draw, layers):
    """Not in order, and with layers that do not fit alone."""
    shortest, longest = draw.choice(((0, 3), (0, layers), (1, 4), (1, layers)))
    return [min(layers, j + draw.randint(shortest, longest)) for j in range(layers)]


def test_random_models_are_cut_as_well_as_by_trying_every_cut_and_no_cut_can_be_moved_to_be_more_even():
    draw, refused, moves = random.Random(20), 0, 0
    for case in range(600):
        layers = draw.randint(1, 12)
        costs = random_costs(draw, layers, ("whole", "floats", "one rounding apart")[case % 3])
        stages, reach = draw.randint(1, layers), random_reach(draw, layers) if case % 2 else None
        best = lightest(costs, stages, reach)
        if best is None:
            refused += 1
            with pytest.raises(PlacementError):
                partition(costs, stages, reach)
            continue
        cells = partition(costs, stages, reach)
        fits = reach or [layers] * layers
        assert len(cells) == stages
        assert all(cell.stop <= fits[cell.start] for cell in cell_ranges(cells, layers))
        assert heaviest(costs, cells) == best, (costs, stages, reach)
        loads = [sum(costs[i] for i in cell) for cell in cell_ranges(cells, layers)]
        assert max(loads) == pytest.approx(best, rel=1e-12, abs=0)
        before, ends = list(accumulate(costs, initial=0)), list(accumulate(cells, initial=0))
        # The heaviest cell is the least there is, so a move that is more even cannot be one that breaks this bound.
        for other in single_moves(ends, fits):
            moves += 1
            assert squares(before, other) >= squares(before, ends) * (1 - 1e-12), (costs, stages, reach, ends, other)
    assert 50 < refused < 200
    assert moves > 1000


@pytest.mark.parametrize(
    ("costs", "stages", "reach", "cells"),
    [
        (np.array([3.0, 1, 1, 5, 2, 2]), 3, np.array([3, 4, 4, 5, 6, 6]), [3, 1, 2]),
        ([1] * 12 + [100] + [1] * 12, 5, None, [6, 6, 1, 6, 6]),
        ([200, 1, 1, 10, 1, 1, 1], 5, None, [1, 2, 1, 1, 2]),  # layer 3 is above the mean of layers 1 to 6
        ([0] * 12, 4, None, [3, 3, 3, 3]),
        ([1] * 8, 2, [3, *[8] * 7], [3, 5]),
        ([1, 1, 1, 1], 3, [1, 3, 2, 4], [1, 2, 1]),  # layer 2 does not fit alone
    ],
)
def test_cells_by_hand(costs, stages, reach, cells):
    found = partition(costs, stages, reach)
    assert found == cells
    assert {type(cell) for cell in found} == {int}


def test_layers_too_light_to_change_a_running_float_sum_are_counted_all_the_same():
    # Prefix sums this large are even numbers, so a cut may be one layer from the middle.
    assert partition([1e16] + [1.0] * 40, 3) in ([1, 19, 21], [1, 20, 20], [1, 21, 19])


@pytest.mark.parametrize("scale", [2.0**-1060, 1e300, 10**30])
def test_the_unit_of_the_costs_does_not_matter(scale):
    """Nor that a float counts whole numbers to 2^53 only."""
    costs = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    assert partition([cost * scale for cost in costs], 4) == partition(costs, 4)


def long_models():
    draw, layers = random.Random(5), 1_000
    even = [draw.randint(900, 1100) for _ in range(layers)]
    close = [min(layers, j + draw.randint(9, 40)) for j in range(layers)]
    # The first layers need most of the stages, so that the others must be taken from an even share.
    head = [min(layers, j + (8 if j < 500 else layers)) for j in range(layers)]
    yield "even, a head that hardly fits", even, head
    yield "one huge layer, reach out of order", [*even[:500], 10**9, *even[501:]], close
    yield "exponential magnitudes", [int(2 ** draw.uniform(0, 36)) for _ in range(layers)], [layers] * layers


@pytest.mark.parametrize(("costs", "reach"), [pytest.param(c, r, id=name) for name, c, r in long_models()])
def test_no_cut_of_a_long_model_has_a_lighter_heaviest_cell(costs, reach):
    cells = partition(costs, 128, reach)
    assert len(cells) == 128
    assert all(cell.stop <= reach[cell.start] for cell in cell_ranges(cells, len(costs)))
    before = list(accumulate(costs, initial=0))
    below = heaviest(costs, cells) - 1
    lighter = [min(end, bisect_right(before, before[j] + below) - 1) for j, end in enumerate(reach)]
    fewest = fewest_cells(lighter)
    assert fewest is None or fewest > 128


def test_the_fewest_stages_are_those_of_the_first_number_that_can_be_cut():
    draw = random.Random(3)
    for _ in range(300):
        layers = draw.randint(1, 9)
        reach = random_reach(draw, layers)
        numbers = (k for k in range(1, layers + 1) if any(True for _ in all_ends(layers, k, reach)))
        assert fewest_cells(reach) == next(numbers, None), reach


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (3, 0)])
def test_more_stages_than_layers_are_refused(layers, stages):
    with pytest.raises(SettingError, match=f"cannot cut {layers} layers into {stages} stages"):
        partition([1.0] * layers, stages)


def test_costs_that_are_not_finite_are_refused_and_all_named():
    with pytest.raises(SettingError, match=r"layer 0 has nan, layer 1 has inf and layer 3 has -1$"):
        partition([float("nan"), float("inf"), 3, -1], 2)
    with pytest.raises(SettingError, match=r"layer 4 has nan and 5 more \(10 of 10 layers\)"):
        partition([float("nan")] * 10, 2)


def test_a_reach_of_another_model_is_refused():
    with pytest.raises(ValueError, match="furthest_end has 2 entries, there are 3 layers"):
        partition([1, 2, 3], 2, [3, 3])


@pytest.mark.parametrize("reach", [[min(9, j + 3) for j in range(9)], [j + (j != 7) for j in range(9)]])
def test_cells_of_which_none_fit_are_refused(reach):
    with pytest.raises(PlacementError, match="no cut of 9 layers into 2 cells fits"):
        partition([1.0] * 9, 2, reach)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([2, 2], r"^cells \[2, 2\] hold 4 layers, the model has 3: 1 too many; none may be empty"),
        ([3, 0], "the model has 3: cell 1 has 0; none may be empty"),
        ([0, 5, -1], "hold 4 layers, the model has 3: 1 too many, cell 0 has 0, cell 2 has -1; none may be empty"),
        ([], "hold 0 layers, the model has 3: 3 left out; none may be empty"),
    ],
)
def test_cells_by_hand_must_cover_the_layers_and_every_fault_is_named(cells, said):
    with pytest.raises(SettingError, match=f"{said}, so give cells of 1 layer or more that add up to 3"):
        cell_ranges(cells, 3)
