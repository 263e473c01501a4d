"""Decides whether a failed member is retried.

no           a setting, the data, a checkpoint, a plan that does not fit, non-finite numbers: it would fail again
again        a worker, its machine or the member's process died, or the run's supervisor gave up
when free    others took the devices first: the member never started, and this does not count as an attempt
"""

from __future__ import annotations

from enum import StrEnum

from suite.errors import BusyError, PlacementError, PlanError, StallError, SuiteError, WorkerError

MAX_ATTEMPTS = 3
"""Within a run ``train.max_restarts`` already bounds the attempts. A member that fails a third time needs a person, and
other members can use its devices."""

PAUSE_S = 10.0
"""Seconds before a retry: Ray frees the devices of a killed process within a few."""


class RetryDecision(StrEnum):
    NO = "no"
    AGAIN = "again"
    WHEN_FREE = "when free"


class MemberError(SuiteError):
    """A member failed in its own process, which also decided whether to retry it."""

    def __init__(self, message: str, verdict: RetryDecision) -> None:
        self.verdict = verdict
        super().__init__(message)


def decide_retry(error: BaseException) -> RetryDecision:
    if isinstance(error, MemberError):
        return error.verdict
    if isinstance(error, BusyError):
        return RetryDecision.WHEN_FREE
    retryable = isinstance(error, WorkerError | StallError | PlacementError) and not isinstance(error, PlanError)
    return RetryDecision.AGAIN if retryable else RetryDecision.NO


def message_of(error: BaseException) -> str:
    """Returns an error as one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, SuiteError) else lines[-1]  # a traceback ends with the error
