"""What a worker is doing now: written by its main thread, read by the thread that writes heartbeats.

start | F0 F1 F2 B2 B1 B0 update save | F0 ...     ``actions_begun`` counts these entries, so a stalled action is seen
                 ^                                 by a count that does not change. A worker that waits for others is
                 waiting: the gradients from       reported only if all wait, or if it is silent
                 stage 2 of micro-batch 1

The host of a GPU runs ahead of it, so where the host stands says little:

host     F0 F1 F2 B2 B1 B0 close, waits for its device
device   F0 F1 ^                                   ``on_device`` finds the first mark that the device has not passed
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from suite.pipeline.runtime.p2p import MessageTimeout
from suite.pipeline.schedule.action import Action

if TYPE_CHECKING:
    from suite.pipeline.runtime.stage import Stage

FIRST_ACTION_TIMEOUT_S = 300.0
"""Seconds an action may take before a step's length is known: workers start, compile and read at different speeds."""

MIN_ACTION_TIMEOUT_S, ACTION_TIMEOUT_STEPS = 8.0, 4.0
"""Afterwards: seconds, and steps, that an action may take. A stall is reported within ten seconds or five steps,
polling included."""

MAX_DEVICE_MARKS = 1 << 14
"""Older ones are dropped, in case nobody reads them."""


@dataclass(frozen=True)
class DeviceMark:
    """A point of the device's stream: everything before it is done once its event has happened."""

    action: Action
    waiting: str
    """What the device waits for before this point; empty if it computes."""
    event: Any
    enqueued_s: float = field(default_factory=time.monotonic)


@dataclass
class WorkerStatus:
    """One worker's current state."""

    message_timeout: MessageTimeout = field(default_factory=lambda: MessageTimeout(FIRST_ACTION_TIMEOUT_S))
    """The deadline of messages; it knows which one the worker waits for."""
    on_change: Callable[[], None] | None = None
    """Called at every change."""
    stage: Stage | None = None
    action: Action | str = "start"
    step: int | None = None
    """None before the first step and in an evaluation."""
    first_step: int | None = None
    """The first step of this attempt; None until it is known."""
    actions_begun: int = 0
    began_s: float = field(default_factory=time.monotonic)
    """When this action began, or its last wait for all others ended."""
    action_timeout_s: float = FIRST_ACTION_TIMEOUT_S
    """Seconds that one action may take."""
    _extra_timeout_s: float = 0.0
    steps_done: int = 0
    """How many steps this attempt has done."""
    device_marks: deque[DeviceMark] = field(default_factory=lambda: deque(maxlen=MAX_DEVICE_MARKS))
    """The marks of a device whose host runs ahead, in order; those that it has passed are removed by ``on_device``."""
    _passed_s: float = 0.0
    """When the last mark was found passed."""
    _waiting: str = ""
    _longest_step_s: float = 0.0

    def begin(self, what: Action | str, step: int | None) -> None:
        """Records that an action begins, or another phase such as ``update``."""
        self.action, self.step, self.began_s = what, step, time.monotonic()
        self.actions_begun += 1
        if self.on_change is not None:
            self.on_change()

    @contextmanager
    def waiting_for(self, what: str, timeout_s: float = 0.0) -> Iterator[None]:
        """A context in which this worker may wait for all others, for ``timeout_s`` if that exceeds the usual limit.

        After an exception the state stays: the report then says that others kept it waiting.
        """
        before = self._waiting, self._extra_timeout_s
        self._waiting, self._extra_timeout_s = what, timeout_s
        yield
        self._waiting, self._extra_timeout_s = before
        self.began_s = time.monotonic()

    def allow(self, timeout_s: float) -> AbstractContextManager[None]:
        """A context in which this worker alone may take longer than an action usually may."""
        return self.waiting_for("", timeout_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds of this action since its last wait, or of the current wait."""
        return time.monotonic() - max(self.began_s, self.message_timeout.ended_s)

    @property
    def current_timeout_s(self) -> float:
        """Seconds that this action may take."""
        return max(self.action_timeout_s, self._extra_timeout_s)

    @property
    def waiting(self) -> str:
        """What the worker waits for now; empty while it computes."""
        return self._waiting or self.message_timeout.waiting_for

    def on_device(self) -> tuple[DeviceMark, float] | None:
        """Returns the mark that the device has not passed yet and the seconds since the one before; None if it has
        passed all. Asks the device without waiting for it."""
        try:
            while self.device_marks and self.device_marks[0].event.query():
                self.device_marks.popleft()
                self._passed_s = time.monotonic()
        except RuntimeError:  # the device has failed, and the main thread gets this error too
            self.device_marks.clear()
        if not self.device_marks:
            return None
        mark = self.device_marks[0]
        return mark, time.monotonic() - max(mark.enqueued_s, self._passed_s)

    @property
    def layer(self) -> int | None:
        """The layer whose forward runs now; None in a backward, which runs a whole cell."""
        return self.stage.current_layer if self.stage is not None else None

    def step_done(self, seconds: float) -> None:
        """Records a step's duration. The timeout follows the slowest recent step."""
        self.steps_done += 1
        self._longest_step_s = max(seconds, 0.9 * self._longest_step_s)
        self.action_timeout_s = max(MIN_ACTION_TIMEOUT_S, ACTION_TIMEOUT_STEPS * self._longest_step_s)
