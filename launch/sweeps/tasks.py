"""The tasks of a sweep, and their log lines while they run."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.base.cluster import Cluster
from launch.runs.store import RunFolder
from launch.sweeps.dashboard import SweepProgress
from launch.sweeps.member import MemberSpec, log_console
from launch.sweeps.member_process import run_member
from launch.sweeps.pending import PendingMember
from launch.sweeps.process_pool import ProcessPool
from launch.sweeps.retries import MAX_ATTEMPTS, MemberError, RetryDecision, message_of
from launch.sweeps.scheduler import DevicePool, SchedulerState, Task, run_tasks
from suite.errors import SuiteError

MIN_WAIT_S = 30.0
"""Seconds that tasks must wait for others' devices before this is logged: the count of a process that just started or
ended is wrong for some seconds."""


class SweepTasks:
    """A training task and a scoring task for each member.

    On Ray and on GPUs each member is a process. On cores with local worker processes each is a thread of this process:
    one server forks all workers in a tenth of a second, while a process of its own would load the libraries, and its
    server again, which takes ten seconds.
    """

    def __init__(
        self, pending: list[PendingMember], launcher: str, machine: Cluster, logs: Path, console: Console
    ) -> None:
        self._pending, self._launcher, self._logs, self._console = pending, launcher, logs, console
        self._own_processes = launcher == "ray" or machine.kind == "gpu"
        self._assigns_gpus = launcher != "ray" and machine.kind == "gpu"
        self._processes = ProcessPool()
        self._runs: dict[str, tuple[RunFolder, int]] = {}
        """The run and its number of steps, by training task."""
        self._heartbeat_before: dict[str, int] = {}
        """Time of the last heartbeat before a task's start."""
        self._waiting_since: float | None = None
        self.failures: list[str] = []
        """One sentence for each failed task."""

    def run(self, device_pool: DevicePool, variables: dict[str, str]) -> None:
        """Runs all tasks, as many at once as devices allow. An interrupt ends all members' processes."""
        total = device_pool.usage().total
        tasks = [task for pending in self._pending for task in self._tasks(pending, total, variables)]
        self._logs.mkdir(parents=True, exist_ok=True)
        self._console.print(f"{len(tasks)} tasks, {total} devices; their logs are in {self._logs}")
        try:
            with SweepProgress(self._console, len(tasks)) as self._display:
                run_tasks(tasks, device_pool, self)
        finally:
            self._processes.end()

    def started(self, task: Task) -> None:
        """Shows a task in the progress display."""
        if task.name in self._runs:
            self._heartbeat_before[task.name] = _heartbeat_time(self._runs[task.name][0])
        run, steps = self._runs.get(task.name, (None, 1))
        self._display.begin(task.name, run, steps)
        if not self._console.is_terminal:
            self._display.log(f"{task.name}: started")

    def postponed(self, task: Task, error: BaseException, verdict: RetryDecision, attempts: int) -> None:
        """Logs a failure that is retried."""
        self._display.remove(task.name)
        if verdict == RetryDecision.WHEN_FREE:
            self._display.log(
                f"{task.name}: waiting again, because others took the devices first ({message_of(error)})"
            )
            return
        self._display.log(f"{task.name}: failed: {message_of(error)}; attempt {attempts + 1} of {MAX_ATTEMPTS} follows")

    def ended(self, task: Task, error: BaseException | None, attempts: int) -> None:
        """Logs the result of a task, and records a failure: a sentence here, a bug's traceback in the member's log."""
        self._display.end(task.name)
        self._display.log(f"{task.name}: {'done' if error is None else f'failed: {message_of(error)}'}")
        if error is None:
            return
        times = f" {attempts} times, the last time" if attempts > 1 and isinstance(error, MemberError) else ""
        self.failures.append(f"{task.name} failed{times}: {message_of(error)}")
        if not isinstance(error, SuiteError):
            with self._log_path(task.name.partition(" ")[2]).open("a") as log_file:
                traceback.print_exception(error, file=log_file)
        error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold references to processes and pipes

    def poll(self, now: SchedulerState) -> None:
        """Shows progress, and after MIN_WAIT_S that tasks wait for others' devices."""
        waiting = now.others_min > 0 and bool(now.waiting)
        self._waiting_since = (self._waiting_since or time.monotonic()) if waiting else None
        long_wait = self._waiting_since is not None and time.monotonic() > self._waiting_since + MIN_WAIT_S
        held = f"others hold {now.others_min} of {now.total} devices" if long_wait else ""
        if held:
            first = now.waiting[0]
            more = f" and {len(now.waiting) - 1} more wait" if len(now.waiting) > 1 else " waits"
            held += f"; {first.name} (needs {first.need}){more}"
        self._display.poll(held)

    def _tasks(self, pending: PendingMember, total: int, variables: dict[str, str]) -> list[Task]:
        member, pipeline = pending.member, pending.member.experiment.pipeline
        train = f"train {member.folder}"
        slug = self._logs / member.folder.replace("/", "-")
        spec = MemberSpec(
            "train", member.folder, member.experiment.to_toml(), self._launcher, f"{slug}.outcome.json",
            f"{slug}.started", member.scoring,
        )  # fmt: skip
        tasks = []
        if not pending.trained:
            self._runs[train] = pending.run, member.experiment.train.steps
            # a pipeline with more workers than cores shares all of them
            need = min(pipeline.stages * pipeline.replicas, total)
            after = (f"train {member.after}",) if member.after else ()
            work = self._worker(spec, variables)
            tasks.append(Task(train, need, work, after, member.priority, lambda: self._has_new_heartbeat(train)))
        if member.scoring is not None and not pending.scored:
            score, started_file = f"score {member.folder}", Path(spec.started_file)
            work = self._worker(replace(spec, what="score"), variables)
            tasks.append(Task(score, 1, work, (train,), member.priority, started_file.exists))
        return tasks

    def _log_path(self, folder: str) -> Path:
        return self._logs / f"{folder.replace('/', '-')}.log"

    def _has_new_heartbeat(self, task: str) -> bool:
        return _heartbeat_time(self._runs[task][0]) != self._heartbeat_before.get(task, 0)

    def _worker(self, spec: MemberSpec, variables: dict[str, str]) -> Callable[[tuple[int, ...]], None]:
        log_file = self._log_path(spec.folder)

        def work(devices: tuple[int, ...]) -> None:
            if self._own_processes:
                own = {"CUDA_VISIBLE_DEVICES": cuda_visible_devices(devices)} if self._assigns_gpus else {}
                self._processes.run(spec, log_file, {**variables, **own})
                return
            with log_file.open("a", buffering=1) as file:
                run_member(spec, log_console(file))

        return work


def _heartbeat_time(run: RunFolder) -> int:
    """Returns the time of the last heartbeat of a run's workers, by the clock of the disk; 0 without one."""
    try:
        return run.heartbeats.stat().st_mtime_ns
    except OSError:  # there is none, or the member's own process will say what is wrong with the folder
        return 0


def cuda_visible_devices(devices: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for GPUs given by their number in this process."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours else None
    return ",".join(names[at] if names else str(at) for at in devices)
