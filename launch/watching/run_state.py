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
class RunState:
    name: StateName
    attempts: list[dict[str, Any]]
    """The record of each attempt, from its lines of ``attempts.jsonl``: of all resumes, without those whose start was
    not recorded. Its ``outcome`` is done, failed or interrupted; it has none while it runs, and if its supervisor was
    killed."""

    @property
    def cause(self) -> str:
        """Why it failed, in a few words; empty if it did not."""
        return short_cause(self.attempts[-1]) if self.attempts and self.name == "failed" else ""


def short_cause(attempt: dict[str, Any]) -> str:
    """Returns where and why an attempt failed, in a few words; empty if it did not."""
    if attempt.get("outcome") != "failed":
        return ""
    if attempt.get("kind") == "user" or "stage" not in attempt:
        return str(attempt.get("message", "")).partition("\n")[0]
    replica = f"replica {attempt['replica']}, " if attempt.get("R", 1) > 1 else ""
    step = f" at step {attempt['step']}" if "step" in attempt else ""
    died = attempt.get("error_type", "").removeprefix("its process was ")
    what = "stalled" if attempt.get("kind") == "stall" else died
    return f"{replica}stage {attempt['stage']} {what}{step}".replace("  ", " ")


def read_state(run: RunFolder, holds_lock: bool = False) -> RunState:
    """Returns the state of a run. Reads only small files. ``holds_lock`` is whether the caller holds the run's lock."""
    lines = read_attempt_lines(run.attempts)
    attempts = [attempt for attempt in lines.values() if "began" in attempt]
    outcome = str([*lines.values()][-1].get("outcome", "")) if lines else ""
    starting = outcome in _OVER and draft_of(run.experiment).exists()  # of a run that is being resumed
    if not holds_lock and is_locked(run.path) and (outcome not in _OVER or starting):
        return RunState("training", attempts)
    if attempts and not outcome and _is_fresh(run.heartbeats, attempts[-1]["attempt"]):
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
