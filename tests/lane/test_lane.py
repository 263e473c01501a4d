"""A worker's code on a device that is not the CPU: every tensor is there, and the host waits only where it is meant to.

The first GPU that a change meets may be a user's. See ``tests.lane.mode`` for what is found,
``tests.lane.cases`` for what runs.
"""

import functools
import re

import pytest

from tests.lane.cases import CASES, EXAMPLES, OTHER_PEOPLES
from tests.lane.meant import MEANT, faults_of
from tests.lane.mutations import MUTATIONS
from tests.lane.server import ROOT
from tests.marks import slow_but_for

SLOW_PATTERNS = (
    "in fp32",
    "amoebanet",
    "skips over a stage, (interleaved|zero)",
    "toy, (fill_drain|1f1b|interleaved|zero_bubble$|csv|RMSProp|the second)",
    *OTHER_PEOPLES,
    *EXAMPLES[1:],
)
SLOW = re.compile("|".join(SLOW_PATTERNS))
FAST = [case for case in CASES if not SLOW.search(case)]


@pytest.fixture(scope="module")
def results(shared_server):
    """Returns a case's waits and its error; each case runs once."""
    return functools.cache(shared_server.run)


@pytest.mark.parametrize("case", slow_but_for(FAST, CASES))
def test_everything_is_on_the_device_and_the_host_runs_ahead(results, case):
    waits, error = results(case)
    assert error is None
    assert not faults_of(waits)


def test_a_wait_that_is_meant_is_found(results):
    found = {(place, what) for place, what, _ in results("toy, two steps")[0]}
    assert ("suite/pipeline/runtime/executor.py:train", "a value") in found


@pytest.mark.slow
def test_each_wait_that_is_meant_occurs(results):
    """An entry that no case needs any more would hide a wait that comes back."""
    found = {(place, what) for case in CASES for place, what, _ in results(case)[0]}
    assert set(MEANT) == found


def test_each_planted_fault_changes_a_text_that_occurs_once():
    """The faults of ``tests/slow/lane/test_all_mutations.py``."""
    for mutation in MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.text) == 1, mutation.what
        assert mutation.text != mutation.replacement, mutation.what
        assert mutation.case in CASES, mutation.what
