"""The tasks of a sweep, and what is told of them while they run."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.cluster import Cluster
from launch.runs import RunFolder
from launch.sweeps.board import Board
from launch.sweeps.crew import Crew
from launch.sweeps.lanes import Hears, Room, Situation, Task, run_tasks
from launch.sweeps.left import Left
from launch.sweeps.member import Order, carry_out, log_console
from launch.sweeps.retries import BEGUN_AT_MOST, Again, MemberError, told
from suite.errors import SuiteError

SETTLED_S = 30.0
"""Seconds for which tasks must have waited for devices of others before that is told: until a process that began, or
that ended, is counted right, some pass."""


class Work(Hears):
    """For each member to train, then to score.

    Members are processes of their own on Ray and on GPUs. On cores, with plain processes as workers, they are threads
    of this one: their workers are forked from one server, in a tenth of a second, and a process for each would have to
    load the libraries, and its server once more, which takes ten.
    """

    def __init__(self, left: list[Left], launcher: str, machine: Cluster, logs: Path, console: Console) -> None:
        self._left, self._launcher, self._logs, self._console = left, launcher, logs, console
        self._apart = launcher == "ray" or machine.kind == "gpu"
        self._deals_out = launcher != "ray" and machine.kind == "gpu"
        self._crew = Crew()
        self._runs: dict[str, tuple[RunFolder, int]] = {}
        """Of tasks that train: the run and its steps."""
        self._begun: dict[str, int] = {}
        self._seen: dict[str, set[int]] = {}
        """Times of signs of life that were there before a task began."""
        self._waits_since: float | None = None
        self.failures: list[str] = []
        """A sentence a member."""

    def run(self, room: Room, variables: dict[str, str]) -> None:
        """Runs what is left, as much at once as there is room for. An interrupt ends all members' processes."""
        total = room.look().total
        tasks = [task for left in self._left for task in self._tasks(left, total, variables)]
        self._logs.mkdir(parents=True, exist_ok=True)
        self._console.print(f"{len(tasks)} tasks, {total} devices; what each says is in {self._logs}")
        try:
            with Board(self._console, len(tasks)) as self._board:
                run_tasks(tasks, room, self)
        finally:
            self._crew.end()

    def begun(self, task: Task) -> None:
        """Shows a task."""
        self._begun[task.name] = self._begun.get(task.name, 0) + 1
        if task.name in self._runs:
            self._seen[task.name] = _signs(self._runs[task.name][0])
        run, steps = self._runs.get(task.name, (None, 1))
        self._board.begin(task.name, run, steps)
        if not self._console.is_terminal:
            self._board.say(f"{task.name}: begun")

    def put_off(self, task: Task, error: BaseException, verdict: Again) -> None:
        """Tells of a failure that is not the end."""
        self._board.put_off(task.name)
        if verdict == Again.WHEN_FREE:
            self._begun[task.name] -= 1
            self._board.say(f"{task.name}: waits again, others took the devices first ({told(error)})")
            return
        number = f"{self._begun[task.name] + 1} of {BEGUN_AT_MOST}"
        self._board.say(f"{task.name}: failed: {told(error)}; try {number} follows")

    def ended(self, task: Task, error: BaseException | None) -> None:
        """Tells how a task went, and keeps what went wrong: a sentence here, a bug's traceback in the log."""
        self._board.end(task.name)
        self._board.say(f"{task.name}: {'done' if error is None else f'failed: {told(error)}'}")
        if error is None:
            return
        tries = self._begun.get(task.name, 0)
        after = f" {tries} times, the last time" if tries > 1 and isinstance(error, MemberError) else ""
        self.failures.append(f"{task.name} failed{after}: {told(error)}")
        if not isinstance(error, SuiteError):
            with self._log(task.name.partition(" ")[2]).open("a") as log:
                traceback.print_exception(error, file=log)
        error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold on to processes and their pipes

    def look(self, now: Situation) -> None:
        """Tells how far tasks are; and that they wait for devices of others, once that has lasted."""
        waits = now.others_surely > 0 and bool(now.waiting)
        self._waits_since = (self._waits_since or time.monotonic()) if waits else None
        lasted = self._waits_since is not None and time.monotonic() > self._waits_since + SETTLED_S
        held = f"others hold {now.others_surely} of {now.total} devices" if lasted else ""
        if held:
            first = now.waiting[0]
            held += f"; {first.name}, which needs {first.need}, waits" + (
                f", and {len(now.waiting) - 1} more" if len(now.waiting) > 1 else ""
            )
        self._board.look(held)

    def _tasks(self, left: Left, total: int, variables: dict[str, str]) -> list[Task]:
        member, pipeline = left.member, left.member.experiment.pipeline
        train = f"train {member.folder}"
        slug = self._logs / member.folder.replace("/", "-")
        order = Order(
            "train", member.folder, member.experiment.to_toml(), self._launcher, f"{slug}.outcome.json",
            f"{slug}.at-work", member.scoring,
        )  # fmt: skip
        tasks = []
        if not left.trained:
            self._runs[train] = left.run, member.experiment.train.steps
            # cores can take turns: a pipeline over more than there are has them all
            need = min(pipeline.stages * pipeline.replicas, total)
            after = (f"train {member.after}",) if member.after else ()
            work = self._worker(order, variables)
            tasks.append(Task(train, need, work, after, member.priority, lambda: self._beats_again(train)))
        if member.scoring is not None and not left.scored:
            score, sign = f"score {member.folder}", Path(order.at_work)
            work = self._worker(replace(order, what="score"), variables)
            tasks.append(Task(score, 1, work, (train,), member.priority, sign.exists))
        return tasks

    def _log(self, folder: str) -> Path:
        return self._logs / f"{folder.replace('/', '-')}.log"

    def _beats_again(self, task: str) -> bool:
        return bool(_signs(self._runs[task][0]) - self._seen.get(task, set()))

    def _worker(self, order: Order, variables: dict[str, str]) -> Callable[[tuple[int, ...]], None]:
        log = self._log(order.folder)

        def work(devices: tuple[int, ...]) -> None:
            if self._apart:
                own = {"CUDA_VISIBLE_DEVICES": visible(devices)} if self._deals_out else {}
                self._crew.run(order, log, {**variables, **own})
                return
            with log.open("a", buffering=1) as file:
                carry_out(order, log_console(file))

        return work


def _signs(run: RunFolder) -> set[int]:
    """Returns when each of a run's workers last gave a sign of life, by the clock of its disk."""
    times = set()
    for path in run.beats.glob("*.json"):
        with suppress(FileNotFoundError):
            times.add(path.stat().st_mtime_ns)
    return times


def visible(devices: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for some of the GPUs that this process sees, by their order here."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours else None
    return ",".join(names[at] if names else str(at) for at in devices)
