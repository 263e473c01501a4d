"""Runs attempts until one comes to its end: the one supervisor, whoever starts the workers.

attempt 1 ---- steps ---- checkpoint 50 ---- step 63: stage 2 is gone      record the first cause; stop, or
attempt 2                 checkpoint 50 ---- steps ------------------ done  go on from the newest valid manifest
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from experiments.experiment import Experiment
from launch import interrupts
from launch.attempts import Attempts
from launch.causes import Cause, find_cause, reason_to_stop
from launch.runs import how_to_go_on
from launch.watch import Watch
from launch.worker import Job
from suite.errors import PlacementError, SuiteError, WorkerError
from suite.pipeline.faults import plan_text, read_plan


class Launcher(Protocol):
    """What starts workers."""

    def run(self, job: Job, experiment: Experiment, watch: Watch) -> None:
        """Runs one attempt's workers to the end; ends them all where one fails or the watch has a verdict.

        Raises the first cause's SuiteError, or DiedError for a worker that is gone without a word.
        """

    def room(self, workers: int) -> int:
        """Returns how many devices there are, ``workers`` at most, having waited a while for so many."""


Replan = Callable[[int], tuple[Job, Experiment]]
"""Makes of a number of devices a job that needs no more. Raises PlacementError where there is none."""


class Supervisor:
    """One run's attempts."""

    def __init__(
        self, job: Job, experiment: Experiment, launcher: Launcher, replan: Replan, say: Callable[[str], None]
    ) -> None:
        """``say`` tells a person of each failure, and what is done about it."""
        self._job, self._experiment = job, experiment
        self._launcher, self._replan, self._say = launcher, replan, say
        self._faults = plan_text()
        if self._faults:
            say(f"GPIPE_FAULTS plans {len(read_plan(self._faults))} faults for this run")
        self._asked = _workers(experiment)
        self._attempts = Attempts(job.run.attempts)
        self._causes: list[Cause] = []
        self._new = 0
        """How many of the latest there were since the last new checkpoint."""
        self._start: int | None = None
        """The step that the latest attempt began with."""
        self._failed_at: float | None = None

    def run(self) -> None:
        """Runs the job to its end.

        Raises the error of a fault that no other attempt mends, WorkerError where attempts are given up, PlacementError
        when devices were lost and the run may not, or cannot, go on with fewer.
        """
        while (error := self._attempt()) is not None:
            cause = self._causes[-1]
            reason = reason_to_stop(self._causes, self._new, self._experiment.train.restarts)
            if reason is not None:
                raise self._stopped(error, cause, reason) from error
            self._say(f"attempt {self._job.attempt} ended: {cause.told}")
            self._make_room(cause)
            self._say(f"attempt {self._job.attempt + 1} goes on from the newest whole checkpoint")

    def _attempt(self) -> SuiteError | None:
        """Runs one attempt; returns what ended it early, having noted why."""
        again = self._job.resume or bool(self._causes)
        number = self._attempts.begin(self._experiment)
        self._job = job = replace(self._job, attempt=number, resume=again, faults=self._faults)
        outcome, failure = "interrupted", None
        watch = Watch(job, self._experiment, self._stepped)
        try:
            with watch:
                self._launcher.run(job, self._experiment, watch)
            outcome = "done"
        except Exception as error:
            if interrupts.received():  # what fails then is no failure of the run
                raise KeyboardInterrupt from error
            # its traceback would hold on to this attempt's processes and pipes; the workers' logs have their own
            outcome, failure = "failed", _as_fault(error).with_traceback(None)
            failure.__context__ = failure.__cause__ = None
            self._failed_at = time.monotonic()
        finally:
            cause = find_cause(failure, job.run, watch) if failure is not None else None
            self._attempts.end(job.attempt, watch, outcome, cause)
        if cause is not None:
            start = watch.began_with
            if start is not None and self._start is not None and start > self._start:
                self._new = 0
            self._start = start if start is not None else self._start
            self._causes.append(cause)
            self._new += 1
        return failure

    def _stepped(self) -> None:
        """Hears of an attempt's first step."""
        if self._failed_at is not None:
            seconds = time.monotonic() - self._failed_at
            self._attempts.recovered(self._job.attempt, seconds)
            self._say(f"training again, {seconds:.1f} s after the failure was noticed")
            self._failed_at = None

    def _stopped(self, error: SuiteError, cause: Cause, reason: str) -> SuiteError:
        if cause.kind == "user":
            return error
        number = self._job.attempt
        said, _, rest = cause.told.partition("\n")
        if self._experiment.train.restarts == 0:
            reason = "train.restarts is 0"
        return WorkerError(
            f"{said}. Attempt {number} was the last: {reason}. When mended, "
            f"`{how_to_go_on(self._job.run)}` goes on from the newest checkpoint" + (f"\n{rest}" if rest else "")
        )

    def _make_room(self, cause: Cause) -> None:
        """Sees that the next attempt needs no more devices than there are."""
        there = self._launcher.room(self._asked)
        train = self._experiment.train
        if there < self._asked and not train.elastic:
            told = cause.told.splitlines()[0]
            raise PlacementError(
                f"{told}. Of the {self._asked} devices that the run needs {there} are left, and no other came; "
                f"when they are back, `{how_to_go_on(self._job.run)}` goes on from the newest checkpoint; with "
                'SET="train.elastic=true" it goes on with those that are there'
            )
        if there == self._asked == _workers(self._experiment):
            return
        before = self._experiment.pipeline
        self._job, self._experiment = self._replan(there)
        now = self._experiment.pipeline
        if now != before:
            self._say(
                f"{there} of {self._asked} devices are there: K {before.stages} -> {now.stages}, "
                f"R {before.replicas} -> {now.replicas}, M {before.micro_batches} -> {now.micro_batches}; "
                "the mini-batch stays"
            )


def _as_fault(error: Exception) -> SuiteError:
    if isinstance(error, SuiteError):
        return error
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return WorkerError(f"the workers could not be started: {type(error).__name__}: {first}")


def _workers(experiment: Experiment) -> int:
    return experiment.pipeline.stages * experiment.pipeline.replicas
