"""The exact partition against every other cut there is."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.partition import cell_ranges, partition

costs_and_stages = st.lists(st.integers(0, 20), min_size=1, max_size=9).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def loads(costs, cells):
    return [sum(costs[i] for i in cell) for cell in cell_ranges(cells, len(costs))]


def all_cuts(layers, stages):
    for ends in combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in zip((0, *ends), (*ends, layers), strict=True)]


@given(costs_and_stages)
def test_no_other_cut_has_a_lighter_heaviest_cell_or_is_as_light_and_more_even(case):
    costs, stages = case
    mine = loads(costs, partition(costs, stages))
    best = min(
        (max(load), sum(x * x for x in load)) for load in (loads(costs, c) for c in all_cuts(len(costs), stages))
    )
    assert (max(mine), sum(x * x for x in mine)) == best


def test_a_drawn_example():
    assert partition([3, 1, 1, 5, 2, 2], 3) == [3, 1, 2]


def test_a_heavy_head_gets_a_cell_of_its_own():
    assert partition([1] * 8 + [10], 2) == [8, 1]


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (3, 0), (0, 1)])
def test_more_stages_than_layers_are_refused(layers, stages):
    with pytest.raises(SettingError, match=f"cannot cut {layers} layers into {stages} stages"):
        partition([1.0] * layers, stages)


def test_negative_costs_are_refused():
    with pytest.raises(SettingError, match=r"layer 1 has -2"):
        partition([1, -2, 3], 2)


@pytest.mark.parametrize("cells", [[2, 2], [3, 0], [4, -1], []])
def test_cells_by_hand_must_cover_the_layers(cells):
    with pytest.raises(SettingError, match="the model has 3"):
        cell_ranges(cells, 3)


def test_t128_on_sixteen_stages_is_even():
    """Encoder layers 106, decoder 147, as at laptop scale: no stage more than one layer above the mean."""
    costs = [1, *[106] * 64, 1, *[147] * 64, 456]
    assert max(loads(costs, partition(costs, 16))) <= sum(costs) / 16 + 147
