"""Measured layer costs on disk: a JSON file per workload and device. Each records how busy the machine was during the
measurement, because other processes make the costs too high.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from suite.paths import write_atomically
from suite.pipeline.planning.costs import LayerCost, SkipInput
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.simulate import Link

LARGEST_RATIO = 1.3
"""Two measurements, or a plan and its run, disagree when their ratio is larger than this."""


def disagree(a_s: float, b_s: float) -> bool:
    """Returns whether two times differ by more than a factor of ``LARGEST_RATIO``."""
    return max(a_s, b_s) > LARGEST_RATIO * min(a_s, b_s)


@dataclass(frozen=True)
class CostRecord:
    costs: tuple[LayerCost, ...]
    machine: Machine
    load: float
    """The machine's one-minute load average before the measurement."""
    measured: float
    """Time of the measurement; seconds since 1970."""
    doubted: bool = False
    """Whether the first steps of a run disagreed with it: the plan of the next new run measures again."""
    confirmed: bool = False
    """Whether it was measured on an idle machine and agrees with the doubted one that it replaced: a further
    disagreement does not make it doubted."""

    @property
    def seconds(self) -> float:
        """Forward, recomputation and backward of all layers, one micro-batch."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def spread(self) -> float:
        """Relative spread of all layers, weighted by their seconds."""
        return sum(cost.relative_spread * cost.seconds for cost in self.costs) / self.seconds

    @property
    def conditions(self) -> str:
        return f"load {self.load:.1f}, spread {self.spread:.2f}"

    def confirms(self, doubted: CostRecord, cores: int) -> bool:
        """Returns whether it agrees with a doubted record and the machine, with ``cores`` cores, was idle: two
        measurements of a busy machine can agree, too."""
        idle = self.load <= cores / 2 and self.spread <= LARGEST_RATIO
        return idle and not disagree(self.seconds, doubted.seconds)

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> CostRecord | None:
        """Returns the record of a file, or None if there is no valid one."""
        try:
            fields = json.loads(path.read_text())
            link = Link(**fields["machine"]["link"])
            machine = Machine(**dict(fields["machine"], link=link))
            return CostRecord(**dict(fields, costs=tuple(map(_layer_cost, fields["costs"])), machine=machine))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def doubt(self, path: Path) -> None:
        replace(self, doubted=True).write(path)


def _layer_cost(fields: dict[str, Any]) -> LayerCost:
    return LayerCost(**fields | {"skip_inputs": tuple(SkipInput(**skip) for skip in fields["skip_inputs"])})
