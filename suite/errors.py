"""Faults a user can mend: what was asked, what was found, what to do. The command line prints them and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


class SuiteError(Exception):
    """Base of all user faults. The message is one complete sentence for a person; no traceback is shown."""


class SettingError(SuiteError):
    """A setting has an unknown name, a wrong type, or a value that contradicts another."""


class DataError(SuiteError):
    """Text or a cache of it is missing, damaged or too small for what was asked."""


class CheckpointError(SuiteError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class PathError(SuiteError):
    """A path from another machine or an archive leaves the folder that it belongs in."""


class TrackingError(SuiteError):
    """What was recorded for wandb does not get there."""


class PlacementError(SuiteError):
    """The devices at hand cannot hold what was asked."""


class BusyError(PlacementError):
    """A cluster has the devices, and others hold them now."""


class PlanError(PlacementError):
    """What was asked cannot be run as it is. All faults are told at once, then the nearest plans that can be run."""

    def __init__(self, faults: Sequence[str], remedies: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        self.faults, self.remedies, self.notes = tuple(faults), tuple(remedies), tuple(notes)
        super().__init__(self.faults, self.remedies, self.notes)

    def __str__(self) -> str:
        many = len(self.faults) > 1
        told = f"{len(self.faults)} faults:\n- " + "\n- ".join(self.faults) if many else self.faults[0]
        told += "".join(f"\n({note})" for note in self.notes)
        return told + ("\nnearest plans that fit:\n- " + "\n- ".join(self.remedies) if self.remedies else "")


class StallError(SuiteError):
    """A stage waited for another beyond its deadline."""


class NeighbourLostError(StallError):
    """Another worker's process ended. The cause is there, not here: shown only when nothing better is known."""


class WorkerError(SuiteError):
    """A worker process ended without a result."""


class DiedError(WorkerError):
    """A worker's process is gone and said nothing: killed, out of memory, or its node was lost."""

    def __init__(self, rank: int, how: str, kind: Literal["death", "node", "preemption"] = "death") -> None:
        self.rank, self.how, self.kind = rank, how, kind
        super().__init__(rank, how, kind)

    def __str__(self) -> str:
        return f"worker {self.rank} gave no result: {self.how}"


class ForkserverError(WorkerError):
    """The process that workers are forked from is gone, and they with it: no fault of any of them."""


@dataclass(frozen=True)
class Where:
    """Where in a run something went wrong, as far as it is known."""

    replica: int
    stage: int
    step: int | None = None
    action: str | None = None
    layer: int | None = None
    host: str = ""
    log: str = ""


class ProgramError(WorkerError):
    """An exception of the program itself in a worker, such as one that a layer raised: what, and where."""

    def __init__(self, told: str, what: str, where: Where) -> None:
        self.what, self.where = what, where
        super().__init__(told, what, where)

    def __str__(self) -> str:
        return str(self.args[0])


class NumbersError(SuiteError):
    """Training produced non-finite numbers more often than is allowed."""


def nearest(asked: str, known: Iterable[str], count: int = 3) -> str:
    """Returns ``did you mean a, b?`` for the known names most like the one asked, or all of them when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(asked, names, n=count, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"known names: {', '.join(names)}"
