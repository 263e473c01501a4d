"""Measured layer costs on disk, a JSON file per workload and device, and how far the runs on a device were off their
plans, a file of JSON lines per device. A measurement records how busy the machine was: other processes make the costs
too high.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suite.paths import write_atomically
from suite.pipeline.planning.costs import LayerCost, SkipInput
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.simulate import Link
from suite.training.jsonl import read_lines

LARGEST_RATIO = 1.3
"""A plan and its run disagree when their ratio is larger than this; a measurement of a larger spread was disturbed."""

LAST = 10
"""The runs that count: a device's driver, its cooling and its neighbours change."""


@dataclass(frozen=True)
class CostRecord:
    costs: tuple[LayerCost, ...]
    machine: Machine
    load: float
    """The machine's one-minute load average before the measurement."""
    measured: float
    """Time of the measurement; seconds since 1970."""

    @property
    def spread(self) -> float:
        """Relative spread of all layers, weighted by their seconds."""
        seconds = sum(cost.seconds for cost in self.costs)
        return sum(cost.relative_spread * cost.seconds for cost in self.costs) / seconds

    @property
    def conditions(self) -> str:
        return f"load {self.load:.1f}, spread {self.spread:.2f}"

    def disturbance(self, cores: float) -> tuple[str, ...]:
        """Returns a note if other work disturbed the measurement: a load above the cores, or a large spread."""
        if self.load <= cores and self.spread <= LARGEST_RATIO:
            return ()
        on_cores = "" if math.isinf(cores) else f" on {cores} cores"
        return (
            f"other work disturbed the measurement of the layers (load {self.load:.1f}{on_cores}, spread "
            f"{self.spread:.2f}); REMEASURE=1 measures them again",
        )

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


def _layer_cost(fields: dict[str, Any]) -> LayerCost:
    return LayerCost(**fields | {"skip_inputs": tuple(SkipInput(**skip) for skip in fields["skip_inputs"])})


def note_run(history: Path, planned_s: float, measured_s: float) -> None:
    """Adds a run: the step that was planned, and the median of its first ones. A full disk does not end a run."""
    with suppress(OSError), history.open("a") as lines:
        # a line of its own, even after one that a crash cut off
        lines.write("\n" + json.dumps({"planned_s": planned_s, "measured_s": measured_s}) + "\n")


def last_runs(history: Path) -> tuple[str, ...]:
    """Returns a note on the measured and planned steps of the last runs; none before the first."""
    ratios = []
    with suppress(OSError):  # a plan does without
        for run in read_lines(history):
            with suppress(TypeError, KeyError, ZeroDivisionError):  # a damaged line
                ratios.append(run["measured_s"] / run["planned_s"])
    if not ratios:
        return ()
    last = ratios[-LAST:]
    runs, range_ = f"the last {len(last)} runs", f"{min(last):.2f} to {max(last):.2f}"
    if len(last) == 1:
        runs, range_ = "the last run", f"{last[0]:.2f}"
    return (f"{runs} on this device took {range_} times the planned step",)
