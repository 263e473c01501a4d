"""Where the numbers of a run go: JSON lines in its folder, always, and wandb (``wandb_run``).

One worker writes, the one that holds the loss. Every record carries our own ``step``, the count of steps done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from suite.training.lines import reopened

Values = Mapping[str, float]


class Tracker(Protocol):
    """Takes a run's numbers as they come."""

    def log(self, step: int, values: Values) -> None:
        """Records the numbers of one step."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Records the end of the run."""


class JsonLines:
    """``metrics.jsonl``: a line a step. Lines after the step a run resumes from are dropped when it opens."""

    def __init__(self, path: Path, start: int) -> None:
        self._file = reopened(path, start)

    def log(self, step: int, values: Values) -> None:
        """Appends one line, at once visible to whoever follows the file; JSON knows no NaN, so that becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write({"step": step, **finite})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the file; the summary is ``record.json``'s business."""
        self._file.close()
