"""Micro-batches are as even as consecutive ranges can be."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from suite.data.text.cutting import cut_evenly, padded

WIDTH = st.integers(1, 70)


def cost(widths: list[tuple[int, int]], part: range, multiple: int) -> int:
    rows = [widths[i] for i in part]
    return len(rows) * (padded(max(s for s, _ in rows), multiple) + padded(max(t for _, t in rows), multiple))


@given(st.lists(st.tuples(WIDTH, WIDTH), max_size=9), st.integers(1, 12), st.sampled_from([1, 2, 8]))
def test_the_heaviest_part_is_as_light_as_can_be(widths: list[tuple[int, int]], parts: int, multiple: int):
    ranges = cut_evenly(widths, parts, multiple)
    assert [i for part in ranges for i in part] == list(range(len(widths)))
    assert all(ranges)
    assert len(ranges) == min(parts, len(widths))
    if widths:
        cuts = combinations(range(1, len(widths)), len(ranges) - 1)
        options = ([range(a, b) for a, b in pairwise([0, *cut, len(widths)])] for cut in cuts)
        best = min(max(cost(widths, part, multiple) for part in option) for option in options)
        assert max(cost(widths, part, multiple) for part in ranges) == best
