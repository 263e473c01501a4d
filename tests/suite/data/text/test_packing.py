"""Packing: every pair once, as many rows as asked for, well filled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.data.text import packing
from tests.suite.data.text import reference_batches as reference

sides = st.integers(1, 48)


def pack(lengths, rows):
    """Returns the pairs of each row as lists."""
    packed = packing.pack(np.array(lengths), rows)
    return [packed.take(np.array([row])).pairs.tolist() for row in range(len(packed.counts))]


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=200), st.integers(1, 40), st.integers(2, 30))
def test_every_pair_is_in_one_row_and_groups_side_by_side_are_packed_as_one_after_the_other(lengths, rows, together):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_TOGETHER", together)
        patch.setattr(reference, "TOGETHER", together)
        found = pack(lengths, rows)
        assert found == reference.pack(lengths, rows)
        assert sorted(pair for row in found for pair in row) == list(range(len(lengths)))
        assert len(found) == min(rows, len(lengths))


@pytest.mark.parametrize(("pairs", "rows"), [(100, 16), (5000, 1000)])
def test_rows_are_filled_well_even_if_the_sides_of_a_pair_are_unrelated(pairs, rows):
    draws = np.random.default_rng(0)
    lengths = [(int(1 + a), int(1 + b)) for a, b in draws.geometric(0.08, (pairs, 2)).clip(1, 47)]
    widest = [max(sum(lengths[pair][side] for pair in row) for side in (0, 1)) for row in pack(lengths, rows)]
    assert sum(map(sum, lengths)) / (2 * sum(widest)) > 0.85
    assert max(widest) < 1.25 * sum(widest) / rows
