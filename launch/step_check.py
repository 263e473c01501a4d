"""Compares the first steps of a run with its plan. Where they disagree, the layer costs were measured on a busier or a
less busy machine: that is said, and the next plan measures them again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from experiments.planned import Planned, in_seconds
from launch.cost_records import CostRecord, disagree
from launch.runs import RunFolder
from suite.training.lines import last_line

WARM_UPS, STEPS = 2, 5
"""Steps that are not counted, since memory is first taken and shapes first seen in them, and steps whose median is."""


class StepCheck:
    """Takes a run's steps as they come; compares once."""

    def __init__(self, run: RunFolder, planned: Callable[[], Planned], say: Callable[[str], None]) -> None:
        """``planned`` returns the plan that the run now follows."""
        self._planned, self._say = planned, say
        self._done = int((last_line(run.metrics) or {"step": 0})["step"])
        """The last step of before a resume: its lines come once more."""
        self._seconds: list[float] = []

    def step(self, step: int, seconds: float) -> None:
        """Takes the seconds of a step."""
        if step <= self._done or len(self._seconds) == WARM_UPS + STEPS:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == WARM_UPS + STEPS:
            self._compare(statistics.median(self._seconds[WARM_UPS:]))

    def _compare(self, step_s: float) -> None:
        planned = self._planned()
        file = planned.price.file
        record = CostRecord.read(file) if file is not None else None
        if record is None or record.costs != planned.price.costs or not disagree(step_s, planned.step_s):
            return
        told = (
            f"a step takes {in_seconds(step_s)} (median of {STEPS}), the plan says {in_seconds(planned.step_s)}; the "
            f"layer costs were measured at {record.conditions}"
        )
        if record.confirmed:
            self._say(f"{told}, twice and with the same result, so they are not measured again: something else differs")
            return
        assert file is not None
        record.doubt(file)
        self._say(f"{told}; the next plan measures them again")
