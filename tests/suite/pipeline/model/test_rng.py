"""Seeds that tell every place apart."""

from hypothesis import given
from hypothesis import strategies as st

from suite.pipeline.model.rng import initial_seed, layer_seed, mix

place = st.tuples(st.integers(0, 99), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 2000))


@given(place, place)
def test_different_places_get_different_seeds(one, other):
    assert (layer_seed(*one) == layer_seed(*other)) == (one == other)
    assert 0 <= layer_seed(*one) < 2**63


def test_all_seeds_of_a_run_differ_and_order_counts():
    assert mix(1, 2, 3) != mix(3, 2, 1)
    assert layer_seed(0, 0, 0, 0) != initial_seed(0, 0)
    seeds = {layer_seed(0, step, micro, layer) for step in range(20) for micro in range(8) for layer in range(40)}
    assert len(seeds) == 20 * 8 * 40
