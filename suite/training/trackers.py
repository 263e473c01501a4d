"""Where the metrics of a run go: always JSON lines in its folder, wandb (``wandb_run``), and TensorBoard if asked.

One worker writes them, the metrics rank. Every record has a ``step``, the number of steps done.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from suite.log import Log
from suite.training.jsonl import reopen
from suite.training.metrics import STEP

Values = Mapping[str, float]


class Tracker(Protocol):
    """Records a run's metrics."""

    def log(self, step: int, values: Values) -> None:
        """Records the metrics of one step, or of a validation after it: those have names in ``valid/``."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Records the end of the run."""


class MetricsFile:
    """``metrics.jsonl``: one line per step, and one per validation. Drops lines after the step that a run resumes
    from."""

    def __init__(self, path: Path, start: int) -> None:
        self._file = reopen(path, start)

    def log(self, step: int, values: Values) -> None:
        """Appends one line, visible to readers at once. NaN becomes null, because JSON has no NaN."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write({STEP: step, **finite})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._file.close()


class TensorBoard:
    """Event files in a folder, one for each start. TensorBoard drops the steps that a later file repeats. A write that
    fails is logged once, and training continues without it."""

    def __init__(self, folder: Path, start: int, log: Log) -> None:
        """``start`` is the step that the run resumes from."""
        from tensorboardX.event_file_writer import EventsWriter  # its SummaryWriter blocks for good on a full disk
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._log = log
        self._writer: Any = None
        with self._disabled_by_errors():
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")  # two may start in one second
            self._writer.write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
            begin = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=time.time(), step=start + 1, session_log=begin))

    def log(self, step: int, values: Values) -> None:
        """Adds one scalar for each metric, visible to readers at once."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        if self._writer is None:
            return
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        with self._disabled_by_errors():
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
            self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        with self._disabled_by_errors():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _disabled_by_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            self._log(f"TensorBoard's events cannot be written ({error}); the metrics are in metrics.jsonl")
