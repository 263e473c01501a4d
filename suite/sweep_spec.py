"""A sweep of your own: runs to compare, each with several seeds. docs/own-model.md has an example.

def rates() -> SweepSpec:
    return SweepSpec(
        runs=[SweepRun(f"rate {rate:g}", digits, f"optimizer.learning_rate={rate}") for rate in (1e-3, 1e-2)], seeds=3
    )

gpipe sweep my_sweep.py:rates
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.train_spec import TrainSpec


@dataclass(frozen=True)
class SweepRun:
    """One of the runs to compare."""

    label: str
    """What the report calls it; no other run of the sweep has the same."""
    run: Callable[[], TrainSpec] | str
    """A function without arguments (``functools.partial`` gives it some), or an experiment's name: ``t12_400m``,
    ``my_run.py:digits``."""
    settings: str = ""
    """What differs, such as ``"optimizer.learning_rate=3e-4"`` (docs/settings.md)."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """Which runs to compare. Each is trained ``seeds`` times, with ``train.seed`` from 0 to ``seeds`` - 1."""

    runs: Sequence[SweepRun]
    seeds: int = 1
