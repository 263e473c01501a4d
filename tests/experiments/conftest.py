"""What tests of experiments share: each workload's layer costs are estimated once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from experiments.planning import problem

_estimated_once = cache(problem._estimated.__wrapped__)


@pytest.fixture(autouse=True)
def _shared_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer costs do not depend on a device's memory: tests share those of one workload on devices of any memory."""
    monkeypatch.setattr(
        problem,
        "_estimated",
        lambda work, device, logits_bytes: _estimated_once(work, replace(device, memory_bytes=0), logits_bytes),
    )
