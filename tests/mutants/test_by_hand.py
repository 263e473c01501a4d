"""A fault whose text is gone cannot be planted."""

from pathlib import Path

import pytest

from tests.mutants.by_hand import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_text_of_a_fault_occurs_once(fault):
    assert (ROOT / fault.file).read_text().count(fault.text) == 1
