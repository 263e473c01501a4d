"""Seeds that tell every place apart."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from suite.device import generator_of
from suite.pipeline.model.layers import materialize
from suite.pipeline.model.rng import initial_seed, layer_seed, mix, set_seed

place = st.tuples(st.integers(0, 99), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 2000))


@given(place, place)
def test_different_places_get_different_seeds(one, other):
    assert (layer_seed(*one) == layer_seed(*other)) == (one == other)
    assert 0 <= layer_seed(*one) < 2**63


def test_order_counts_and_initial_values_have_seeds_of_their_own():
    assert mix(1, 2, 3) != mix(3, 2, 1)
    assert layer_seed(0, 0, 0, 0) != initial_seed(0, 0)


CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", "cuda:3"])
def device(request, monkeypatch):
    """A GPU has a generator of its own; here it stands in a list of others."""
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(4)))
    return torch.device(request.param)


def draws(device):
    """Returns a number of every generator: torch's of the host and of the device, Python's and numpy's."""
    of_device = torch.rand((), generator=generator_of(device))
    return float(torch.rand(())), float(of_device), random.random(), np.random.random()


def test_a_seed_repeats_the_draws_of_every_generator(device):
    set_seed(5, device)
    first = draws(device)
    assert all(one != other for one, other in zip(first, draws(device), strict=True))
    set_seed(5, device)
    assert draws(device) == first
    set_seed(6, device)
    assert all(one != other for one, other in zip(first, draws(device), strict=True))


def test_the_generators_of_other_devices_are_left_alone(device):
    before = torch.cuda.default_generators[0].get_state()
    set_seed(5, device)
    assert torch.equal(torch.cuda.default_generators[0].get_state(), before)


class Drawn(nn.Module):
    """Its initial values are draws of all generators of the host."""

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.empty(3, device="meta"))

    def reset_parameters(self):
        with torch.no_grad():
            self.values.copy_(torch.tensor([float(torch.rand(())), random.random(), np.random.random()]))


def test_initial_values_depend_on_the_seed_alone_and_disturb_nobody():
    set_seed(1, CPU)
    made = Drawn()
    one = materialize(made, 7, CPU)
    after = draws(CPU)
    set_seed(1, CPU)
    assert draws(CPU) == after
    other = materialize(Drawn(), 7, CPU)
    assert torch.equal(one.values, other.values)
    assert not torch.eq(one.values, materialize(made, 8, CPU).values).any()
    assert made.values.is_meta
