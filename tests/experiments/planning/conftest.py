"""What tests of plans share."""

from __future__ import annotations

import pytest

from experiments.planning import problem
from suite.pipeline.planning import devices, search


@pytest.fixture(autouse=True)
def _short_climbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds its schedule after a few of the actions."""
    monkeypatch.setattr(search, "ACTIONS_WITHOUT_GAIN", 3_000)


@pytest.fixture
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """For devices of a few MiB, less than a process or a communicator takes."""
    monkeypatch.setattr(problem, "GPU_PROCESS_BYTES", 0)
    monkeypatch.setattr(problem, "P2P_BYTES", 0)
    monkeypatch.setattr(devices, "COLLECTIVE_BYTES", 0)
