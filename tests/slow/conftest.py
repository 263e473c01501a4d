"""Fixtures of the slow tests."""

from contextlib import ExitStack

import pytest

from tests.slow.trial import Trials


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def ended():
    """Returns a function that returns what it is given, of which ``end`` is called when the test is over."""
    with ExitStack() as stack:

        def keep(one):
            stack.callback(one.end)
            return one

        yield keep
