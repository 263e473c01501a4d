"""Fixtures of the lane."""

import pytest

from tests.lane.server import Server


@pytest.fixture(scope="session")
def shared_server():
    """A process for all cases without a mutation."""
    with Server() as server:
        yield server
