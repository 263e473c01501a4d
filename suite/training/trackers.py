"""Where the metrics of a run go: always JSON lines in its folder, and wandb (``wandb_run``).

One worker writes them, the metrics rank. Every record has a ``step``, the number of steps done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from suite.training.jsonl import reopen
from suite.training.metrics import STEP

Values = Mapping[str, float]


class Tracker(Protocol):
    """Records a run's metrics."""

    def log(self, step: int, values: Values) -> None:
        """Records the metrics of one step."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Records the end of the run."""


class MetricsFile:
    """``metrics.jsonl``: one line per step. Drops lines after the step that a run resumes from."""

    def __init__(self, path: Path, start: int) -> None:
        self._file = reopen(path, start)

    def log(self, step: int, values: Values) -> None:
        """Appends one line, visible to readers at once. NaN becomes null, because JSON has no NaN."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write({STEP: step, **finite})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the file; the summary goes to ``record.json``."""
        self._file.close()
