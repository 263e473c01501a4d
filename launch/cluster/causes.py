"""The first cause of a failed attempt, out of Ray's wrappers."""

from __future__ import annotations

from suite.errors import DiedError, NeighbourLostError, StallError, SuiteError, WorkerError


def first_cause(error: Exception) -> SuiteError:
    """Returns the first cause: what a worker says of itself, before the death of one, before others that only waited
    for it."""
    if isinstance(error, SuiteError):
        return error
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    causes = [(rank, _unwrap(failure)) for rank, failure in sorted(failures.items())]
    faults = [cause for _, cause in causes if isinstance(cause, SuiteError)]
    faults.sort(key=lambda fault: (isinstance(fault, StallError), isinstance(fault, NeighbourLostError)))
    others = [(rank, cause) for rank, cause in causes if not isinstance(cause, SuiteError)]
    if faults and not (others and isinstance(faults[0], StallError)):
        return faults[0]
    if not others:
        return WorkerError(f"Ray could not run the workers: {first_line(_unwrap(error))}")
    rank, cause = others[0]
    if getattr(cause, "preempted", False):
        return DiedError(rank, "its node was taken back", "preemption")
    died = "Actor" in type(cause).__name__ or "Worker" in type(cause).__name__
    how = "its process ended (killed, or out of memory)" if died else f"{type(cause).__name__}: {first_line(cause)}"
    return DiedError(rank, how)


def _unwrap(error: BaseException) -> BaseException:
    """Looks inside Ray's wrappers for the error that a worker raised."""
    for name in ("cause", "controller_failure", "_base_exc", "training_error", "__cause__"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException) and inner is not error:
            return _unwrap(inner)
    return error


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
