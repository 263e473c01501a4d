"""A worker's code on a device that is not the CPU: every tensor is there, and the host waits only where it is meant to.

The first GPU that a change meets may be a user's. See ``tests.lane.mode`` for what is found,
``tests.lane.cases`` for what runs.
"""

import pytest

from tests.lane.cases import CASES
from tests.lane.meant import MEANT, faults_of
from tests.lane.server import Server


@pytest.fixture(scope="module")
def results():
    """Returns a case's waits and its error; each case runs once."""
    known = {}
    with Server() as server:

        def result(case):
            if case not in known:
                known[case] = server.run(case)
            return known[case]

        yield result


@pytest.mark.parametrize("case", CASES)
def test_everything_is_on_the_device_and_the_host_runs_ahead(results, case):
    waits, error = results(case)
    assert error is None
    assert not faults_of(waits)


def test_each_wait_that_is_meant_occurs(results):
    """An entry that no case needs any more would hide a wait that comes back."""
    found = {(place, what) for case in CASES for place, what, _ in results(case)[0]}
    assert set(MEANT) == found
