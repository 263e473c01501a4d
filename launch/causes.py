"""Why an attempt ended, and whether another one is worth while.

user         settings, data, a checkpoint, numbers: trying again changes nothing                      never
program      an exception of the code in a worker: a device may be flaky, a bug is not                 unless the
death        a process is gone without a word                                                          same comes
stall        a worker holds up all others                                                              twice in
start        the workers could not be started                                                          a row
node         a machine is gone, with its processes       ) counted apart: no fault of the program      always
preemption   a machine was taken back                    )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.beats import Beat
from launch.runs import RunFolder
from launch.watch import Watch
from suite.errors import DiedError, ForkserverError, ProgramError, StallError, SuiteError, WorkerError

Kind = Literal["user", "program", "death", "stall", "start", "node", "preemption"]

LOST: tuple[Kind, ...] = ("node", "preemption")


@dataclass(frozen=True)
class Cause:
    """The first cause of an attempt's end."""

    kind: Kind
    told: str
    """One sentence for a person, and for a stall where each stage stood."""
    what: str = ""
    """The exception's type."""
    replica: int | None = None
    stage: int | None = None
    step: int | None = None
    action: str | None = None
    layer: int | None = None
    host: str = ""
    node: str = ""
    log: str = ""

    def same(self, other: Cause) -> bool:
        """Whether both are one failure at one place. Of an exception the micro-batch does not matter; a stall without
        a place is like no other."""
        if self.kind in LOST or (self.kind == "stall" and self.action is None):
            return False
        if self.kind == "start":
            return other.kind == "start" and self.told == other.told
        one, two = ((c.kind, c.what, c.replica, c.stage, c.step, _place(c)) for c in (self, other))
        return one == two


def _place(cause: Cause) -> str | None:
    return cause.action[:1] if cause.kind == "program" and cause.action else cause.action


def find_cause(error: SuiteError, run: RunFolder, watch: Watch) -> Cause:
    """Returns why an attempt ended: what the watch saw comes first, since what followed from it was reported too; but
    for an exception, which tells more, and a lost machine."""
    verdict = watch.verdict
    lost = isinstance(error, DiedError) and error.kind in LOST
    if verdict is not None and not lost and not isinstance(error, ProgramError):
        place, beat = verdict.place, verdict.beat
        log = str(run.log(place.replica, place.stage))
        told = f"{verdict.told}; its log is {log}\n{watch.grid()}"
        return _seen(Cause("stall", told, "", place.replica, place.stage, log=log), beat)
    if isinstance(error, ProgramError):
        at = error.where
        beat = watch.beats.get(watch.places[0].rank_of(at.replica, at.stage))
        node = beat.node if beat else ""
        return Cause(
            "program", str(error), error.what, at.replica, at.stage, at.step, at.action, at.layer, at.host, node, at.log
        )
    if isinstance(error, DiedError):
        return _died(error, run, watch)
    if isinstance(error, ForkserverError):
        return Cause("death", str(error), type(error).__name__, step=watch.reached)
    if isinstance(error, StallError):
        return Cause("stall", f"{error}\n{watch.grid()}", type(error).__name__)
    if isinstance(error, WorkerError):
        return Cause("start", str(error), type(error).__name__)
    return Cause("user", str(error), type(error).__name__)


def _died(error: DiedError, run: RunFolder, watch: Watch) -> Cause:
    place, beat = watch.places[error.rank], watch.beats.get(error.rank)
    log = str(run.log(place.replica, place.stage))
    where = f" on {beat.host}" if beat else ""
    seen = f", last seen at {beat.at}" if beat else " before its first sign of life"
    told = f"{place}{where}: {error.how}{seen}; its log is {log}"
    return _seen(Cause(error.kind, told, error.how, place.replica, place.stage, log=log), beat)


def _seen(cause: Cause, beat: Beat | None) -> Cause:
    """Returns a cause with where its worker was last seen."""
    if beat is None:
        return cause
    return replace(cause, step=beat.step, action=beat.what, layer=beat.layer, host=beat.host, node=beat.node)


def reason_to_stop(causes: Sequence[Cause], new: int, restarts: int) -> str | None:
    """Returns why no other attempt is made, or None. ``causes`` are those of all attempts so far, ``new`` of them since
    the last new checkpoint; the ``restarts`` allowed are so many faults of processes, and as many lost machines."""
    last = causes[-1]
    if last.kind == "user":
        return "it is no fault that another attempt would mend"
    if len(causes) > 1 and last.same(causes[-2]):
        return "the same failure came twice at the same place"
    lost = last.kind in LOST
    count = sum((cause.kind in LOST) == lost for cause in causes[-new:])
    if count > restarts:
        of = "lost machines" if lost else "faults"
        return f"{count} {of} without a new checkpoint, train.restarts allows {restarts}"
    return None
