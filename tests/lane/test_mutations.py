"""Faults that are planted in the product, which the lane finds: ``tests/slow/lane/test_all_mutations.py``."""

import pytest

from tests.lane.cases import CASES
from tests.lane.meant import faults_of
from tests.lane.mutations import MUTATIONS
from tests.lane.server import ROOT


def finding(server, mutation):
    """Returns what the lane says of a mutation; empty if it finds nothing."""
    waits, error = server.run(mutation.case, mutation[1:4])
    return error or ", ".join(f"{place} waits for {what}" for place, what, _ in faults_of(waits))


def without_fault(case):
    """Returns a mutation of a case that changes nothing."""
    mutation = next(mutation for mutation in MUTATIONS if mutation.case == case)
    return mutation._replace(replacement=mutation.text)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_text_of_a_mutation_occurs_once(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.text) == 1
    assert mutation.text != mutation.replacement
    assert mutation.case in CASES
