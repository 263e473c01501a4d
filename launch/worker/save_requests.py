"""Asks for checkpoints beside those of ``train.checkpoint_every``: by the clock, and one before an early end.

driver   SIGTERM --> file END_FILE beside a worker's heartbeat --> Ask.END in the step's all-reduce --> all save and end
"""

from __future__ import annotations

import time
from pathlib import Path

from suite.training.loop import Ask

END_FILE = "end"


class SaveRequests:
    """Of one worker; what one asks for, all do."""

    def __init__(self, folder: Path | None, minutes: float | None) -> None:
        """``folder`` is that of the heartbeats. A worker without ``minutes`` never asks by the clock."""
        self._end = folder / END_FILE if folder is not None else None
        self._interval_s = 60 * minutes if minutes is not None else None
        self._saved_s = time.monotonic()

    def __call__(self) -> Ask:
        """Returns what this worker asks for at the end of the step."""
        if self._end is not None and self._end.exists():
            return Ask.END
        if self._interval_s is not None and time.monotonic() >= self._saved_s + self._interval_s:
            self._saved_s = time.monotonic()
            return Ask.SAVE
        return Ask.NOTHING
