"""Records when a stage does what. On a GPU it uses events of its stream, because the host runs ahead of the device.

A span begins when an action's message has arrived and ends with its last computation; it never includes waiting.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from suite.device import is_host, module_of, synchronize
from suite.pipeline.schedule.timeline import Span, SpanKind

Mark = Any
"""A point in time: seconds of the host's monotonic clock, or an event in the device's stream."""


class Recorder:
    """The spans of one worker's step, in seconds of this host's monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = is_host(device)
        self._device = device
        self._recorded: list[tuple[SpanKind, int, Mark, Mark, int]] = []
        self._zero: Mark = None
        """The event at the beginning of a step."""
        self.began = 0.0

    def begin(self) -> float:
        """Clears the spans and begins a step; returns the time."""
        self._recorded.clear()
        synchronize(self._device)
        self.began = time.monotonic()
        if not self._is_host:
            self._zero = self.mark()
        return self.began

    def mark(self) -> Mark:
        """Returns the current time."""
        if self._is_host:
            return time.monotonic()
        event = module_of(self._device).Event(enable_timing=True)
        event.record()
        return event

    def record(self, kind: SpanKind, micro_batch: int, start: Mark, virtual_stage: int = 0) -> None:
        """Records an action from ``start`` to now; ``micro_batch`` is -1 for one that belongs to all."""
        self._recorded.append((kind, micro_batch, start, self.mark(), virtual_stage))

    def spans(self) -> list[Span]:
        """Returns the spans since ``begin``; waits for a GPU."""
        synchronize(self._device)
        return [
            Span(kind, i, self._seconds(start), self._seconds(end), virtual_stage)
            for kind, i, start, end, virtual_stage in self._recorded
        ]

    def _seconds(self, mark: Mark) -> float:
        if self._is_host:
            return float(mark)
        return self.began + float(self._zero.elapsed_time(mark)) / 1e3
