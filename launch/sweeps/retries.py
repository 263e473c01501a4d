"""What becomes of a member that failed.

no           a setting, the data, a checkpoint, a plan that does not fit, numbers that stay bad: it would fail again
again        a worker or its machine is gone, the member's own process was killed, what the run's supervisor gave up
when free    others took the devices first: it never began, and that does not count
"""

from __future__ import annotations

from enum import StrEnum

from suite.errors import BusyError, PlacementError, PlanError, StallError, SuiteError, WorkerError

BEGUN_AT_MOST = 3
"""Times. Inside of a run ``train.restarts`` bounds the attempts already; what fails a third time with all of them needs
somebody to look, and the devices are of more use to other members."""

PAUSE_S = 10.0
"""Seconds before another try: Ray gives the devices of a process that was killed free within a few."""


class Again(StrEnum):
    """Whether a task is tried again."""

    NO = "no"
    AGAIN = "again"
    WHEN_FREE = "when free"


class MemberError(SuiteError):
    """A member failed in a process of its own, which has judged already whether it is worth another try."""

    def __init__(self, told: str, verdict: Again) -> None:
        self.verdict = verdict
        super().__init__(told)


def again(error: BaseException) -> Again:
    """Returns whether what failed with this error is tried again."""
    if isinstance(error, MemberError):
        return error.verdict
    if isinstance(error, BusyError):
        return Again.WHEN_FREE
    lost = isinstance(error, WorkerError | StallError | PlacementError) and not isinstance(error, PlanError)
    return Again.AGAIN if lost else Again.NO


def told(error: BaseException) -> str:
    """Returns a fault in a line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, SuiteError) else lines[-1]  # of a worker's traceback the last says what it was
