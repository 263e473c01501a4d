"""Which cases of a test ``make test`` leaves to ``make test-faults``."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but_for(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns parameters of which all but the ``fast`` ones are marked as slow."""
    return [
        case if case in fast else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]
