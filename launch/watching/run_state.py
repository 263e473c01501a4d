"""The state of a run, from its folder alone: its lock, its attempts, its workers' heartbeats.

training       a process holds its lock, or its workers send heartbeats (they may be on another machine)
finished       its last attempt ended with the last step
failed         its last attempt ended with an error that no restart followed
interrupted    ended by a signal, or the process that supervised it is gone
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.registry import read_settings
from launch.error_log import log_error
from launch.runs.checkpoints import read_published
from launch.runs.store import RunFolder, is_locked
from launch.supervision.attempt_log import read_attempt_lines
from launch.supervision.watchdog import FRESH_S
from launch.worker.attempt import draft_of
from launch.worker.heartbeat import ENDED, read_heartbeats
from suite.errors import RunFileError, SuiteError, first_line
from suite.paths import read_json

StateName = Literal["training", "finished", "interrupted", "failed"]

_OVER = ("done", "interrupted")
"""Outcomes after which a lock is held by something else than training, such as scoring."""


@dataclass(frozen=True)
class PastAttempt:
    """One attempt of a run: its lines of ``attempts.jsonl`` as one record."""

    number: int
    fields: dict[str, Any]

    @property
    def outcome(self) -> str:
        """done, failed or interrupted; empty while it runs, and if its supervisor was killed."""
        return str(self.fields.get("outcome", ""))

    @property
    def short_cause(self) -> str:
        """Where and why it failed, in a few words; empty if it did not."""
        fields = self.fields
        if self.outcome != "failed":
            return ""
        if fields.get("kind") == "user" or "stage" not in fields:
            return str(fields.get("message", "")).partition("\n")[0]
        replica = f"replica {fields['replica']}, " if fields.get("R", 1) > 1 else ""
        step = f" at step {fields['step']}" if "step" in fields else ""
        died = fields.get("error_type", "").removeprefix("its process was ")
        what = "stalled" if fields.get("kind") == "stall" else died
        return f"{replica}stage {fields['stage']} {what}{step}".replace("  ", " ")


@dataclass(frozen=True)
class RunState:
    name: StateName
    attempts: tuple[PastAttempt, ...]
    """All of them, across resumes, without those whose start was not recorded."""

    @property
    def last(self) -> PastAttempt | None:
        """The last attempt; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def cause(self) -> str:
        """Why it failed, in a few words; empty if it did not."""
        return self.last.short_cause if self.last is not None and self.name == "failed" else ""


def read_state(run: RunFolder, holds_lock: bool = False) -> RunState:
    """Returns the state of a run. Reads only small files. ``holds_lock`` is whether the caller holds the run's lock."""
    lines = read_attempt_lines(run.attempts)
    attempts = tuple(PastAttempt(number, fields) for number, fields in lines.items() if "began" in fields)
    outcome = str([*lines.values()][-1].get("outcome", "")) if lines else ""
    starting = outcome in _OVER and draft_of(run.experiment).exists()  # of a run that is being resumed
    if not holds_lock and is_locked(run.path) and (outcome not in _OVER or starting):
        return RunState("training", attempts)
    if attempts and not outcome and _is_fresh(run.heartbeats, attempts[-1].number):
        return RunState("training", attempts)
    ended: dict[str, StateName] = {"done": "finished", "failed": "failed"}
    return RunState(ended.get(outcome, "interrupted"), attempts)


def damage(run: RunFolder) -> str:
    """Returns which small file of a run is damaged, why, and what to do; empty without one."""
    try:
        if run.experiment.exists():
            read_settings(run.experiment)
        for record in (run.record, run.plan_json, run.scores):
            read_json(record)
        read_published(run)
    except RunFileError as error:
        return str(error)
    return ""


@contextmanager
def unexpected_content(run: RunFolder) -> Iterator[None]:
    """A context that reads files of a run that somebody may have edited. Raises RunFileError when one cannot be read,
    and when their content has other types or fields than the suite writes."""
    try:
        yield
    except SuiteError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise RunFileError(
            f"a file of run {run.path} cannot be read, or has content that the suite does not write "
            f"({type(error).__name__}: {first_line(error)}); restore it from a copy; if nobody has edited it, this is "
            f"a defect of the suite: the traceback is in {log_error(error)}"
        ) from error


def _is_fresh(heartbeats: Path, attempt: int) -> bool:
    """Whether the heartbeats were noted just now, and a worker has not ended."""
    with suppress(OSError):
        if time.time() - heartbeats.stat().st_mtime <= FRESH_S:
            return any(heartbeat.action not in ENDED for heartbeat in read_heartbeats(heartbeats, attempt))
    return False
