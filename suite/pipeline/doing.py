"""What a worker is doing now: written by the one thread that works, read by the one that tells the supervisor.

start | F0 F1 F2 B2 B1 B0 update save | F0 ...     every entry is a turn; ``turns`` counts them, so one that stands
                 ^                                 still has a number that does not change. A worker that waits
                 waiting: the gradients from       for others is never the first cause of a stall
                 stage 2 of micro-batch 1
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from suite.pipeline.action import Action
from suite.pipeline.faults import Faults
from suite.pipeline.transport import Deadline

if TYPE_CHECKING:
    from suite.pipeline.stage import Stage

FIRST_PATIENCE = 300.0
"""Seconds a turn may last before a step's length is known: workers start, compile and read at different speeds."""

SHORTEST_PATIENCE, STEPS_A_PATIENCE = 8.0, 4.0
"""Afterwards. A stall is to be named within ten seconds or five steps, the looking and the telling included."""


@dataclass
class Doing:
    """One worker's present. ``faults`` are those a test has planned for it; None in every other run."""

    deadline: Deadline = field(default_factory=lambda: Deadline(FIRST_PATIENCE))
    """Of messages; it knows which one is waited for."""
    faults: Faults | None = None
    tell: Callable[[], None] | None = None
    """Hears of every turn at once."""
    stage: Stage | None = None
    what: Action | str = "start"
    step: int | None = None
    """None before the first step and in an evaluation."""
    start: int | None = None
    """The step that this attempt began with; None before that is known."""
    turns: int = 0
    began: float = field(default_factory=time.monotonic)
    """When this turn began, or its last wait for all others was over."""
    usual: float = FIRST_PATIENCE
    """Seconds that one turn may last."""
    _longer: float = 0.0
    steps: int = 0
    """Done in this attempt."""
    _waiting: str = ""
    _longest: float = 0.0

    def turn(self, what: Action | str, step: int | None) -> None:
        """Says that another action begins, or one of the words for what is none."""
        self.what, self.step, self.began = what, step, time.monotonic()
        self.turns += 1
        if self.tell is not None:
            self.tell()
        if self.faults is not None:
            self.faults.strike(str(what), step)

    @contextmanager
    def waits(self, what: str, patience: float = 0.0) -> Iterator[None]:
        """A context in which this worker may wait for all others, for longer than an action may last if so given.

        After an exception it waits on: what it says then is that others left it waiting.
        """
        before = self._waiting, self._longer
        self._waiting, self._longer = what, patience
        yield
        self._waiting, self._longer = before
        self.began = time.monotonic()

    @contextmanager
    def takes(self, patience: float) -> Iterator[None]:
        """A context in which this worker alone may take longer than an action otherwise may."""
        with self.waits("", patience):
            yield

    @property
    def since(self) -> float:
        """Seconds that this turn has lasted since its last wait, or that the present wait has."""
        return time.monotonic() - max(self.began, self.deadline.ended)

    @property
    def patience(self) -> float:
        """Seconds that this turn may last."""
        return max(self.usual, self._longer)

    @property
    def waiting(self) -> str:
        """What is waited for now; empty where this worker computes."""
        return self._waiting or self.deadline.waiting

    @property
    def layer(self) -> int | None:
        """The layer whose forward runs now; a backward is that of a whole cell."""
        return self.stage.now if self.stage is not None else None

    def stepped(self, seconds: float) -> None:
        """Notes how long a step took: that of the slow ones counts, and fades."""
        self.steps += 1
        self._longest = max(seconds, 0.9 * self._longest)
        self.usual = max(SHORTEST_PATIENCE, STEPS_A_PATIENCE * self._longest)
