"""Runs attempts of a job until one finishes, with any launcher.

attempt 1 ---- steps ---- checkpoint 50 ---- step 63: stage 2 died      records the root cause; stops, or
attempt 2                 checkpoint 50 ---- steps ------------ done     resumes from the newest valid checkpoint
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.custom.loading import absolute
from launch import interrupts
from launch.runs.store import resume_command
from launch.supervision.attempt_log import AttemptLog
from launch.supervision.failure import SAME_FAILURE, SAME_NODE, Cause, find_cause, on_same_node, reason_to_stop
from launch.supervision.watchdog import Watchdog
from launch.worker.attempt import Attempt
from launch.worker.run_plan import RunPlan
from suite.errors import EndedEarlyError, PlacementError, SettingError, SuiteError, WorkerError, typed_line
from suite.log import Log


class Launcher(Protocol):
    def run(self, attempt: Attempt, experiment: Experiment, watchdog: Watchdog) -> None:
        """Runs one attempt's workers to the end; ends all of them if one fails or the watchdog has a verdict.

        Raises the SuiteError of the root cause, or WorkerDiedError for a worker that died without a report.
        """

    def available_devices(self, workers: int) -> int:
        """Waits for ``workers`` devices for a limited time; returns how many are available, at most ``workers``."""

    def leave_out(self, rank: int) -> str:
        """Places the next attempt without the node of a worker, and returns the node's name; empty if the others have
        too few free devices."""


def _worker_hook() -> str:
    """Returns GPIPE_WORKER_HOOK with the full path of its file. Raises SettingError if there is no such file."""
    try:
        return absolute(hook) if (hook := os.environ.get("GPIPE_WORKER_HOOK", "")) else ""
    except SettingError as error:
        raise SettingError(f"GPIPE_WORKER_HOOK: {error}") from None


Replan = Callable[[int], tuple[Experiment, RunPlan, Attempt]]
"""Returns the run as it fits on a number of devices. Raises PlacementError if it does not."""


class Supervisor:
    """Runs one run's attempts."""

    def __init__(
        self, experiment: Experiment, plan: RunPlan, attempt: Attempt, launcher: Launcher, replan: Replan, log: Log
    ) -> None:
        """``log`` receives each failure, and the response to it."""
        self._experiment, self._plan, self._attempt = experiment, plan, attempt
        self._launcher, self._replan, self._log = launcher, replan, log
        self._hook = _worker_hook()
        if self._hook:
            log(f"each worker first calls {self._hook} (GPIPE_WORKER_HOOK)")
        self._requested_devices = attempt.workers
        self._checkpoint_step = attempt.checkpoint_step
        """Step of the checkpoint that the user chose; None once an attempt has started from it."""
        self._attempts = AttemptLog(attempt.run.attempts)
        self._causes: list[Cause] = []
        self._left_out_for: list[Cause] = []
        """Failures for which a node was left out."""
        self._failures_since_checkpoint = 0
        self._start: int | None = None
        """First step of the latest attempt."""
        self._failed_at: float | None = None
        self._earlier_record: bytes | None = None
        """``record.json`` of a finished run, if this attempt goes back to an earlier checkpoint."""

    def run(self) -> None:
        """Runs the job to its end.

        Raises the error itself if another attempt cannot fix it, WorkerError when there are no attempts left,
        PlacementError when devices were lost and the run may not, or cannot, continue with fewer.
        """
        while (error := self._run_attempt()) is not None:
            cause = self._causes[-1]
            max_restarts = self._experiment.train.max_restarts
            reason = reason_to_stop(self._causes, self._failures_since_checkpoint, max_restarts)
            number = self._attempt.number
            again = self._failures_since_checkpoint > 1 and on_same_node(self._causes)
            suspicion = reason or (SAME_NODE if again else "")
            node = self._leave_out_node(cause, suspicion)
            if reason is not None and not node:
                raise self._final_error(error, cause, reason) from error
            self._log(f"attempt {number} failed: {cause.message}")
            if node:
                self._log(f"{suspicion}; node {node} is left out, because others have free devices")
            self._fit_to_devices(cause)
            self._log(f"attempt {number + 1} resumes from the newest valid checkpoint")

    def _run_attempt(self) -> SuiteError | None:
        """Runs one attempt and records it; returns the error that ended it, None if it finished."""
        self._attempt = attempt = replace(
            self._attempt,
            number=self._attempts.begin(self._experiment, self._plan.step_s),
            resume=self._attempt.resume or bool(self._causes),
            hook=self._hook,
            checkpoint_step=self._checkpoint_step,
        )
        self._earlier_record = _content(attempt.run.record) if attempt.checkpoint_step is not None else None
        outcome, failure = "interrupted", None
        watchdog = Watchdog(attempt, self._experiment, self._plan, self._on_first_step)
        try:
            with watchdog, interrupts.first_sigterm(watchdog.ends_early, watchdog.trains):
                self._launcher.run(replace(attempt, heartbeats=watchdog.folder), self._experiment, watchdog)
            outcome = "done"
        except Exception as error:
            if interrupts.was_interrupted() or watchdog.ends_early.is_set() or isinstance(error, EndedEarlyError):
                raise interrupts.interrupted() from error
            if not isinstance(error, SuiteError):
                error = WorkerError(f"the workers could not be started: {typed_line(error)}")
            # the traceback would keep this attempt's processes and pipes alive; the workers' logs have their own
            outcome, failure = "failed", error.with_traceback(None)
            failure.__context__ = failure.__cause__ = None
            self._failed_at = time.monotonic()
        finally:
            cause = find_cause(failure, attempt.run, watchdog) if failure is not None else None
            self._attempts.end(attempt.number, watchdog, outcome, cause)
        if watchdog.first_step is not None:
            self._checkpoint_step = None
        if cause is not None:
            start = watchdog.first_step
            if start is not None and self._start is not None and start > self._start:
                self._failures_since_checkpoint = 0
            self._start = start if start is not None else self._start
            self._causes.append(cause)
            self._failures_since_checkpoint += 1
        return failure

    def _on_first_step(self, start: int) -> None:
        """Records when an attempt has finished its first step. If it went back, removes the old ``record.json``, unless
        a short attempt has already written its own."""
        if self._earlier_record is not None and _content(self._attempt.run.record) == self._earlier_record:
            self._attempt.run.record.unlink()
        figures = {"start": start, "first_step_s": time.monotonic() - self._attempts.began}
        if self._failed_at is not None:
            figures["recovered_s"] = time.monotonic() - self._failed_at
            self._log(f"training again, {figures['recovered_s']:.1f} s after the failure was detected")
            self._failed_at = None
        self._attempts.note(attempt=self._attempt.number, **figures)

    def _final_error(self, error: SuiteError, cause: Cause, reason: str) -> SuiteError:
        if cause.kind == "user":
            return error
        number = self._attempt.number
        summary, _, details = cause.message.partition("\n")
        if self._experiment.train.max_restarts == 0:
            reason = "train.max_restarts is 0"
        return WorkerError(
            f"{summary}. Attempt {number} was the last: {reason}. Once the cause is fixed, "
            f"`{resume_command(self._attempt.run)}` continues from the latest checkpoint"
            + (f"\n{details}" if details else "")
        )

    def _leave_out_node(self, cause: Cause, suspicion: str) -> str:
        """Leaves out the node of a failure that came twice, or of two exceptions; returns its name. Returns nothing if
        there is no other one, or if another one was left out and the same happens again: the program is at fault."""
        count, most = self._failures_since_checkpoint, self._experiment.train.max_restarts
        left_out = self._left_out_for if suspicion == SAME_NODE else [*filter(cause.same, self._left_out_for)]
        if suspicion not in (SAME_FAILURE, SAME_NODE) or count > most or cause.stage is None or left_out:
            return ""
        coord = self._plan.coord(0, self._experiment.pipeline)
        if node := self._launcher.leave_out(coord.rank_of(cause.replica or 0, cause.stage)):
            self._left_out_for.append(cause)
        return node

    def _fit_to_devices(self, cause: Cause) -> None:
        """Plans the run again if it has other devices than before."""
        requested = self._requested_devices
        available = self._launcher.available_devices(requested)
        train = self._experiment.train
        if available < requested and not train.elastic:
            raise PlacementError(
                f"{cause.message.splitlines()[0]}. The run needs {requested} devices; {available} are left, and no "
                f"replacement came in {train.device_timeout_s:.0f} s (train.device_timeout_s). When they are back, "
                f"`{resume_command(self._attempt.run)}` continues from the latest checkpoint; with "
                f"{option('SET', 'train.elastic=true')} it continues on the remaining devices"
            )
        if available == self._attempt.workers:
            return
        before = self._experiment.pipeline
        self._experiment, self._plan, self._attempt = self._replan(available)
        now = self._experiment.pipeline
        if now != before:
            self._log(
                f"{available} of {requested} devices are available: K {before.stages} -> {now.stages}, "
                f"R {before.replicas} -> {now.replicas}, M {before.micro_batches} -> {now.micro_batches}; "
                "the mini-batch is unchanged"
            )


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
