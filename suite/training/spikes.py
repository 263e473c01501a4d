"""Losses that leap: what stood far above those before it, a line each in ``spikes.jsonl``.

A leap is over median + 8 deviations of the last hundred losses, the deviation being the median absolute one, scaled to
be a normal distribution's: one leap among them moves neither. It counts as a thousandth of the median at least: a loss
that stands still leaps at no last bit.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from suite.training.lines import reopened
from suite.training.trackers import Values

WINDOW, LEAST = 100, 20
"""Losses looked back at, and how many there must be."""

DEVIATIONS = 8.0

LEAST_DEVIATION = 1e-3
"""Of the median."""

_NORMAL = 1.4826
"""Of a normal distribution: standard deviation over median absolute deviation."""


class Spikes:
    """A tracker that notes leaps of the loss, and says when one begins."""

    def __init__(self, path: Path, start: int, say: Callable[[str], None]) -> None:
        """``start`` is the step that the run goes on from."""
        self._file, self._say = reopened(path, start), say
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._leaping = False

    def log(self, step: int, values: Values) -> None:
        """Looks at one step's loss. Steps that were left out for bad numbers are no leap."""
        if not values["applied"]:
            return
        loss, bound = values["loss"], self.bound()
        leaps = bound is not None and loss > bound
        if leaps:
            line = {"step": step, "bound": bound, **{name: values[name] for name in ("loss", "norm", "rate")}}
            self._file.write(line)
            if not self._leaping:
                median = statistics.median(self._last)
                self._say(
                    f"step {step}: the loss leapt to {loss:.3f} from {median:.3f}; gradient norm {values['norm']:.3g}"
                )
        self._leaping = leaps
        self._last.append(loss)

    def bound(self) -> float | None:
        """Returns what the next loss may be without being a leap; None while too few are known."""
        if len(self._last) < LEAST:
            return None
        median = statistics.median(self._last)
        spread = _NORMAL * statistics.median(abs(loss - median) for loss in self._last)
        return median + DEVIATIONS * max(spread, LEAST_DEVIATION * abs(median))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the file."""
        self._file.close()
