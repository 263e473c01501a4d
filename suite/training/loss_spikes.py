"""Loss spikes: losses far above the recent ones, one line each in ``spikes.jsonl``.

A spike exceeds the median of the last hundred losses by 8 deviations. The deviation is the median absolute deviation,
or the distance from the median to the 90th percentile if that is larger, as it is for losses of small mini-batches;
both are scaled to a normal distribution's standard deviation. One spike in the window hardly changes the bound. The
deviation is at least a hundredth of the median, so noise of a nearly constant loss is no spike.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite.log import Log
from suite.training.jsonl import reopen
from suite.training.metrics import APPLIED, GRAD_NORM, LOSS, LR
from suite.training.trackers import Values

WINDOW, LEAST = 100, 20
"""Losses in the window, and the fewest needed for a bound."""

DEVIATIONS = 8.0

LEAST_DEVIATION = 1e-2
"""As a share of the median."""

_NORMAL = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

_NORMAL_90 = 1.2816
"""90th percentile of a normal distribution, in standard deviations from its median."""


class LossSpikes:
    """A tracker that records loss spikes and logs the first step of each."""

    def __init__(self, path: Path, start: int, log: Log) -> None:
        """``start`` is the step that the run resumes from."""
        self._file, self._log = reopen(path, start), log
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._in_spike = False

    def log(self, step: int, values: Values) -> None:
        """Checks one step's loss. Skipped non-finite steps are no spikes, and validations have no such loss."""
        if not values.get(APPLIED):
            return
        loss, bound = values[LOSS], self.bound()
        is_spike = bound is not None and loss > bound
        if is_spike:
            line = {"step": step, "bound": bound, **{name: values[name] for name in (LOSS, GRAD_NORM, LR)}}
            self._file.write(line)
            if not self._in_spike:
                median = statistics.median(self._last)
                self._log(
                    f"step {step}: the loss rose from {median:.3f} to {loss:.3f}; gradient norm {values[GRAD_NORM]:.3g}"
                )
        self._in_spike = is_spike
        self._last.append(loss)

    def bound(self) -> float | None:
        """Returns the largest next loss that is no spike; None while too few losses are known."""
        if len(self._last) < LEAST:
            return None
        median = statistics.median(self._last)
        spread = _NORMAL * statistics.median(abs(loss - median) for loss in self._last)
        tail = (sorted(self._last)[9 * len(self._last) // 10] - median) / _NORMAL_90
        return median + DEVIATIONS * max(spread, tail, LEAST_DEVIATION * abs(median))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._file.close()
