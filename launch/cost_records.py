"""Measured layer costs on disk, a JSON file for each workload on a device, and how busy the machine was when they were
measured: what else runs there makes them too high.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from suite.pipeline.costs import LayerCost, Taken
from suite.pipeline.plan import Machine
from suite.pipeline.simulate import Link

LARGEST_RATIO = 1.3
"""Two measurements, or a plan and its run, disagree when one is more than so many times the other."""


def disagree(one_s: float, other_s: float) -> bool:
    """Returns whether two times differ by more than ``LARGEST_RATIO``, either way."""
    return max(one_s, other_s) > LARGEST_RATIO * min(one_s, other_s)


@dataclass(frozen=True)
class CostRecord:
    """One measurement."""

    costs: tuple[LayerCost, ...]
    machine: Machine
    load: float
    """The machine's load average of the minute before it: processes that wanted a core."""
    measured: float
    """When; seconds since 1970."""
    doubted: bool = False
    """Whether the first steps of a run disagreed with it: the next plan measures again."""
    confirmed: bool = False
    """Whether it was measured on a calm machine and agrees with a doubted one, which it replaced: another disagreement
    does not put it in doubt."""

    @property
    def seconds(self) -> float:
        """Forward, recomputation and backward of all layers, one micro-batch."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def spread(self) -> float:
        """That of all layers, each by its seconds."""
        return sum(cost.spread * cost.seconds for cost in self.costs) / self.seconds

    @property
    def conditions(self) -> str:
        """Load and spread, for a person."""
        return f"load {self.load:.1f}, spread {self.spread:.2f}"

    def confirms(self, doubted: CostRecord, cores: int) -> bool:
        """Returns whether it agrees with a doubted one, on a machine of so many cores that was calm: two measurements
        of a busy machine can agree, too."""
        calm = self.load <= cores / 2 and self.spread <= LARGEST_RATIO
        return calm and not disagree(self.seconds, doubted.seconds)

    def write(self, path: Path) -> None:
        """Puts the record in place, whole or not at all."""
        draft = path.with_suffix(f".draft-{uuid4().hex}")  # runs of a sweep may measure the same at the same time
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(path)

    @staticmethod
    def read(path: Path) -> CostRecord | None:
        """Returns what was written, or None where there is nothing whole."""
        try:
            kept = json.loads(path.read_text())
            machine = Machine(**dict(kept["machine"], link=Link(**kept["machine"]["link"])))
            return CostRecord(**dict(kept, costs=tuple(map(_cost, kept["costs"])), machine=machine))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def doubt(self, path: Path) -> None:
        """Has the next plan measure again."""
        replace(self, doubted=True).write(path)


def _cost(kept: dict[str, Any]) -> LayerCost:
    return LayerCost(**kept | {"takes": tuple(Taken(**taken) for taken in kept["takes"])})
