"""What tests of plans share."""

from __future__ import annotations

import pytest

from experiments.planning import model_facts
from suite.pipeline.planning import communicators


@pytest.fixture
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """For devices of a few MiB, less than one communicator takes."""
    monkeypatch.setattr(model_facts, "P2P_BYTES", 0)
    monkeypatch.setattr(communicators, "COLLECTIVE_BYTES", 0)
