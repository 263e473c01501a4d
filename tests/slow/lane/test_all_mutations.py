"""Every planted fault is found by the lane, and the lane says where it is."""

import pytest

from tests.lane.mutations import MUTATIONS
from tests.lane.server import Server
from tests.lane.test_mutations import finding


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_fault_is_found(server, mutation):
    found = finding(server, mutation)
    assert found
    print(f"{mutation.what} ({mutation.file}): {found}")
