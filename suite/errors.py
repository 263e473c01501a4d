"""Errors that end a run or a command with one sentence: what is wrong and what to do. The command line exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


class SuiteError(Exception):
    """Base class: faults of a user, and of workers and machines, which may be retried. No traceback is shown."""


class SettingError(SuiteError):
    """A setting has an unknown name, a wrong type, or a value that contradicts another."""


class DataError(SuiteError):
    """Training data or its cache is missing, damaged or too small for the request."""


class CheckpointError(SuiteError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class StorageError(CheckpointError):
    """The storage did not answer. That says nothing about the checkpoint, so no other one is chosen."""


class RunFileError(SuiteError):
    """A small file of a run, such as its record, is empty, broken or unreadable. The message names it."""


class TrackingError(SuiteError):
    """The recorded metrics could not be uploaded to wandb."""


class PlacementError(SuiteError):
    """The available devices cannot run the request."""


class BusyError(PlacementError):
    """The cluster has the devices, but other runs hold them now."""


class PlanError(PlacementError):
    """The requested plan cannot run. The message lists all faults, then the nearest plan that can run."""

    def __init__(self, errors: Sequence[str], remedy: str = "", notes: Sequence[str] = ()) -> None:
        self.errors, self.remedy, self.notes = tuple(errors), remedy, tuple(notes)
        super().__init__(self.errors, self.remedy, self.notes)

    def __str__(self) -> str:
        many = len(self.errors) > 1
        text = f"{len(self.errors)} faults:\n- " + "\n- ".join(self.errors) if many else self.errors[0]
        text += "".join(f"\n({note})" for note in self.notes)
        return text + (f"\nthe nearest plan that fits: {self.remedy}" if self.remedy else "")


class StallError(SuiteError):
    """A wait for another worker failed: it passed its timeout, or the connection closed."""


class PeerLostError(StallError):
    """Another worker's process ended. The root cause is in that worker, so this error is shown only without one."""


class WorkerError(SuiteError):
    """A worker process ended without a result."""


class WorkerDiedError(WorkerError):
    """A worker's process died without a report: killed, out of memory, or its node was lost."""

    def __init__(self, rank: int, how: str, kind: Literal["death", "start", "node", "preemption"] = "death") -> None:
        self.rank, self.how, self.kind = rank, how, kind
        super().__init__(rank, how, kind)

    def __str__(self) -> str:
        return f"worker {self.rank} gave no result: {self.how}"


class ForkserverError(WorkerError):
    """The forkserver process died, and all workers with it. No worker caused this."""


@dataclass(frozen=True)
class FailureLocation:
    """Where in a run an error happened, as far as known."""

    replica: int
    stage: int
    step: int | None = None
    action: str | None = None
    layer: int | None = None
    host: str = ""
    log: str = ""


class ProgramError(WorkerError):
    """An exception of the program itself in a worker, such as one raised by a layer, and where it happened."""

    def __init__(self, message: str, what: str, where: FailureLocation) -> None:
        self.what, self.where = what, where
        super().__init__(message, what, where)

    def __str__(self) -> str:
        return str(self.args[0])


class EndedEarlyError(SuiteError):
    """The run was asked to end, and has saved after a step."""


class NonFiniteError(SuiteError):
    """Training produced non-finite numbers in more steps than allowed."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def typed_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message, cut short, for an error in a user's own code."""
    return f"{type(error).__name__}: {first_line(error)[:500]}"


def shortened(text: str) -> str:
    """Returns a text that a user typed, cut to 100 characters."""
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raises SettingError, with the closest known names, for a name of ``what`` that is none of them."""
    if name not in known:
        raise SettingError(f"unknown {what} {name!r}; {nearest(name, known)}")


def nearest(requested: str, known: Iterable[str]) -> str:
    """Returns ``did you mean a, b?`` with the closest known names, or lists all known names when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(requested, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"known names: {', '.join(names)}"
