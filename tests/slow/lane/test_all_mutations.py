"""Every planted fault is found by the lane, and the lane says where it is."""

import pytest

from tests.lane.mutations import MUTATIONS
from tests.lane.server import Server
from tests.lane.test_mutations import finding, without_fault


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_fault_is_found(server, mutation):
    found = finding(server, mutation)
    assert found
    print(f"{mutation.what} ({mutation.file}): {found}")


@pytest.mark.parametrize("case", dict.fromkeys(mutation.case for mutation in MUTATIONS))
def test_nothing_is_found_without_a_fault(server, case):
    """Otherwise a child that cannot run at all would find every fault."""
    assert not finding(server, without_fault(case))
