"""Every planted fault is found by the lane, and the lane says where it is."""

import pytest

from tests.lane.meant import faults_of
from tests.lane.mutations import MUTATIONS
from tests.lane.server import Server


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


def finding(server, mutation):
    """Returns what the lane says of a mutation; empty if it finds nothing."""
    waits, error = server.run(mutation.case, mutation[1:4])
    return error or ", ".join(f"{place} waits for {what}" for place, what, _ in faults_of(waits))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_fault_is_found(server, mutation):
    found = finding(server, mutation)
    assert found
    print(f"{mutation.what} ({mutation.file}): {found}")


@pytest.mark.parametrize("mutation", {one.case: one for one in MUTATIONS}.values(), ids=lambda one: one.case)
def test_nothing_is_found_without_a_fault(server, mutation):
    """Otherwise a child that cannot run at all would find every fault."""
    assert not finding(server, mutation._replace(replacement=mutation.text))
