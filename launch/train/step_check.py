"""Compares the first steps of a run with its plan, for the intervals of later plans. If they disagree, the layer costs
were measured under a different load: the check logs this, and the plan of the next new run measures them again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from experiments.base.figures import in_seconds
from experiments.planning.plan_report import PlanReport
from launch.planning.cost_records import CostRecord, disagree
from launch.planning.step_history import note
from launch.runs.store import RunFolder
from suite.training.jsonl import last_line

WARM_UPS, STEPS = 2, 5
"""Steps that are skipped, because they allocate memory and see shapes for the first time; steps whose median counts."""


class StepCheck:
    """Collects a run's step times; compares once."""

    def __init__(self, run: RunFolder, planned: Callable[[], PlanReport], log: Callable[[str], None]) -> None:
        """``planned`` returns the run's current plan."""
        self._planned, self._log = planned, log
        self._done = int((last_line(run.metrics) or {"step": 0})["step"])
        """The last step before a resume. The log repeats its lines."""
        self._seconds: list[float] = []

    def step(self, step: int, seconds: float) -> None:
        if step <= self._done or len(self._seconds) == WARM_UPS + STEPS:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == WARM_UPS + STEPS:
            self._compare(statistics.median(self._seconds[WARM_UPS:]))

    def _compare(self, step_s: float) -> None:
        planned = self._planned()
        if planned.layer_costs.history is not None:
            note(planned.layer_costs.history, planned.step_s, step_s)
        found = planned.found_costs
        record = CostRecord.read(found.file) if found.file is not None else None
        if record is None or record.costs != found.costs or not disagree(step_s, planned.step_s):
            return
        difference = (
            f"a step takes {in_seconds(step_s)} (median of {STEPS}), the plan predicts {in_seconds(planned.step_s)}; "
            f"the layer costs were measured at {record.conditions}"
        )
        if record.confirmed:
            self._log(f"{difference}, twice with the same result, so they are kept: the difference has another cause")
            return
        assert found.file is not None
        record.doubt(found.file)
        self._log(f"{difference}; the next new run measures them again")
