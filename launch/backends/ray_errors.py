"""Extracts the root cause of a failed attempt from Ray's exceptions."""

from __future__ import annotations

from suite.errors import DiedError, NeighbourLostError, StallError, SuiteError, WorkerError, first_line


def root_cause(error: Exception) -> SuiteError:
    """Returns the root cause: an error that a worker reported itself takes precedence over the death of a worker, and
    that over errors of workers that waited for another."""
    if isinstance(error, SuiteError):
        return error
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    causes = [(rank, _unwrap(failure)) for rank, failure in sorted(failures.items())]
    reported = [cause for _, cause in causes if isinstance(cause, SuiteError)]
    reported.sort(key=lambda cause: (isinstance(cause, StallError), isinstance(cause, NeighbourLostError)))
    others = [(rank, cause) for rank, cause in causes if not isinstance(cause, SuiteError)]
    if reported and not (others and isinstance(reported[0], StallError)):
        return reported[0]
    if not others:
        return WorkerError(f"Ray could not run the workers: {first_line(_unwrap(error))}")
    rank, cause = others[0]
    if getattr(cause, "preempted", False):
        return DiedError(rank, "its node was preempted", "preemption")
    died = "Actor" in type(cause).__name__ or "Worker" in type(cause).__name__
    how = "its process ended (killed, or out of memory)" if died else f"{type(cause).__name__}: {first_line(cause)}"
    return DiedError(rank, how)


def _unwrap(error: BaseException) -> BaseException:
    """Returns the worker's exception inside Ray's wrapper exceptions."""
    for name in ("cause", "controller_failure", "_base_exc", "training_error", "__cause__"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException) and inner is not error:
            return _unwrap(inner)
    return error
