"""Compares the first steps of a run with its plan: for the notes of later plans, and in a log line if they disagree."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from experiments.base.figures import in_seconds
from experiments.planning.report import PlanReport
from launch.planning.cost_records import LARGEST_RATIO, note_run
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
        if (history := planned.layer_costs.history) is None:  # its costs are estimated
            return
        note_run(history, planned.step_s, step_s)
        ratio = step_s / planned.step_s
        if max(ratio, 1 / ratio) > LARGEST_RATIO:
            self._log(
                f"a step takes {in_seconds(step_s)} (median of {STEPS}), {ratio:.2f} times the planned "
                f"{in_seconds(planned.step_s)}; a new run with REMEASURE=1 measures the layers again"
            )
