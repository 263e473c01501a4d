"""The tasks of a sweep, and their log lines while they run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.base.cluster import Cluster
from launch.runs.store import RunFolder
from launch.sweeps.dashboard import SweepProgress
from launch.sweeps.member import MemberSpec, log_console
from launch.sweeps.member_process import ProcessPool, run_member
from launch.sweeps.pending import PendingMember
from launch.sweeps.retries import MAX_ATTEMPTS, MemberError, RetryDecision, message_of
from launch.sweeps.scheduler import DevicePool, Scheduler, Task
from suite.errors import SuiteError


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
        self.failures: list[str] = []
        """One sentence for each failed task."""

    def run(self, device_pool: DevicePool, variables: dict[str, str]) -> None:
        """Runs all tasks, as many at once as devices allow. An interrupt ends all members' processes."""
        total, _ = device_pool()
        tasks = [task for pending in self._pending for task in self._tasks(pending, total, variables)]
        self._logs.mkdir(parents=True, exist_ok=True)
        self._console.print(f"{len(tasks)} tasks, {total} devices; their logs are in {self._logs}")
        try:
            with SweepProgress(self._console, len(tasks)) as self._display:
                Scheduler(tasks, device_pool, self).run()
        finally:
            self._processes.end()

    def started(self, task: Task) -> None:
        run, steps = self._runs.get(task.name, (None, 1))
        self._display.begin(task.name, run, steps)
        if not self._console.is_terminal:
            self._console.print(f"{task.name}: started")

    def postponed(self, task: Task, error: BaseException, verdict: RetryDecision, attempts: int) -> None:
        self._display.remove(task.name)
        what = f"failed: {message_of(error)}; attempt {attempts + 1} of {MAX_ATTEMPTS} follows"
        if verdict == RetryDecision.WHEN_FREE:
            what = f"waiting again, because others took the devices first ({message_of(error)})"
        self._console.print(f"{task.name}: {what}")

    def ended(self, task: Task, error: BaseException | None, attempts: int) -> None:
        """Logs the result of a task, and records a failure: a sentence here, a bug's traceback in the member's log."""
        self._display.end(task.name)
        self._console.print(f"{task.name}: {'done' if error is None else f'failed: {message_of(error)}'}")
        if error is None:
            return
        times = f" {attempts} times, the last time" if attempts > 1 and isinstance(error, MemberError) else ""
        self.failures.append(f"{task.name} failed{times}: {message_of(error)}")
        if not isinstance(error, SuiteError):
            with self._log_path(task.name.partition(" ")[2]).open("a") as log_file:
                traceback.print_exception(error, file=log_file)
        error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold references to processes and pipes

    def poll(self, waiting_for: str) -> None:
        self._display.poll(waiting_for)

    def _tasks(self, pending: PendingMember, total: int, variables: dict[str, str]) -> list[Task]:
        member, train = pending.member, f"train {pending.member.folder}"
        outcome = str(self._log_path(member.folder).with_suffix(".outcome.json"))
        spec = MemberSpec("train", member.folder, member.experiment.to_toml(), self._launcher, outcome, member.scoring)
        tasks = []
        if not pending.trained:
            self._runs[train] = pending.run, member.experiment.train.steps
            need = min(pending.devices, total)  # a pipeline with more workers than cores shares all of them
            after = (f"train {member.after}",) if member.after else ()
            tasks.append(Task(train, need, self._worker(spec, variables), after, member.priority))
        if member.scoring is not None and not pending.scored:
            work = self._worker(replace(spec, what="score"), variables)
            tasks.append(Task(f"score {member.folder}", 1, work, (train,), member.priority))
        return tasks

    def _log_path(self, folder: str) -> Path:
        return self._logs / f"{folder.replace('/', '-')}.log"

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


def cuda_visible_devices(devices: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for GPUs given by their number in this process."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours else None
    return ",".join(names[at] if names else str(at) for at in devices)
