"""``make sweep NAME=...``: trains and scores what is left of a family of runs, then reports.

A member that is finished is skipped, one that was left is taken up again, one that fails is told at the end and the
others go on. Everything that a member has to say while it runs is in ``logs/`` of the sweep's folder.
"""

from __future__ import annotations

import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from experiments.cluster import Cluster
from experiments.experiment import Experiment
from experiments.registry import read_experiment
from experiments.results import is_scored, read_record
from experiments.scale_choice import find_lack
from experiments.scales import onto
from experiments.sweep import Member, Scoring, folder_name
from experiments.sweeps import find_scale, find_sweep
from experiments.tasks import prepare_data
from experiments.text_experiment import TranslationExperiment
from launch.checkpoints import place_of_run
from launch.devices import this_machine
from launch.runs import CACHE, RUNS, RunFolder, held, named_run
from launch.scoring import score_run
from launch.session import resume, run_experiment
from launch.sweeps.board import Board
from launch.sweeps.lanes import Task, run_tasks
from launch.sweeps.report import write_report
from suite.errors import CheckpointError, PlacementError, SettingError, SuiteError
from suite.training.checkpoint import list_checkpoints

OF_NO_EFFECT = ("threads", "checkpoint_every", "checkpoints", "restarts", "elastic")
"""Settings in which a member's folder may differ from what would be run now."""


def sweep(name: str, asked: str, launcher: str, console: Console) -> list[str]:
    """Runs what is left of a sweep, writes its report and returns a sentence for each member that failed.

    Raises SettingError for an unknown name or scale, and for a member whose folder holds another run; PlacementError
    where the scale needs devices that are not there.
    """
    family, cluster = find_sweep(name), this_machine()
    scale = find_scale(family, asked, cluster)
    members = {member.folder: member for member in family.members(scale, cluster, RUNS.resolve())}
    fitted = [_fitted(member, scale, cluster, console) for member in members.values()]
    folder = RUNS / folder_name(name, scale)
    work = _Work(fitted, launcher, folder, console)
    try:
        work.run(_room(cluster, launcher))
    except KeyboardInterrupt:
        console.print(f"interrupted; make sweep NAME={name} goes on with what is left")
        # threads that wait for processes cannot be interrupted; the processes end with this one, which they watch
        os._exit(130)
    for table in family.tables(scale, cluster, RUNS):
        console.print(table.shown() if console.is_terminal else table.markdown())
    write_report(family, scale, cluster, console)
    return work.failures


@dataclass(frozen=True)
class Left:
    """What a member still needs."""

    member: Member
    trained: bool
    scored: bool

    @property
    def run(self) -> RunFolder:
        return RunFolder((RUNS / self.member.folder).resolve())


def _fitted(member: Member, scale: str, cluster: Cluster, console: Console) -> Member:
    """Returns a member on the data that can be had and the devices there are."""
    experiment = member.experiment
    if scale == "paper" and (lack := find_lack(experiment, cluster)) is not None:
        raise PlacementError(f"the sweep at SCALE=paper: {experiment.name} {lack}; take SCALE=laptop")
    if scale == "gpu" and cluster.kind != "gpu":
        raise PlacementError(f"the sweep at SCALE=gpu is made for a GPU, and there are {cluster}; take SCALE=laptop")
    data = prepare_data(experiment, CACHE, console.print)
    changed = experiment if data == experiment.data else experiment.with_data(data)
    return Member(member.folder, member.label, onto(changed, cluster), member.scoring, member.after)


def what_is_left(member: Member) -> Left:
    """Returns what is left of a member. Raises SettingError when its folder holds a run with other settings."""
    run = RunFolder((RUNS / member.folder).resolve())
    if run.experiment.exists():
        _check_same(read_experiment(run.experiment.read_text()), member.experiment, run)
    record = read_record(run.path)
    trained = record is not None and record["steps"] >= member.experiment.train.steps
    scored = record is not None and is_scored(member, record, read_record(run.path, "scores.json") or {})
    return Left(member, trained, trained and scored)


def _check_same(there: Experiment, here: Experiment, run: RunFolder) -> None:
    """Raises SettingError where two runs would not have the same result. The pipeline is no part of it."""
    for part in (*here.fixed, "optimizer", "train"):
        old, new = (one.model_dump()[part] for one in (there, here))
        differ = [
            f"{part}.{name} is {old.get(name)} there and {value} here"
            for name, value in new.items()
            if name not in OF_NO_EFFECT and old.get(name) != value
        ]
        if differ:
            told = "; ".join(differ)
            raise SettingError(f"{run.path} holds a run with other settings ({told}); move it away or delete it")


def _room(cluster: Cluster, launcher: str) -> int:
    """Returns the cores that members may share. 1: one member after the other, as Ray's workers are placed by a session
    that there is one of, and processes on GPUs would all take the first."""
    return cluster.devices if launcher == "spawn" and cluster.kind == "cpu" else 1


class _Work:
    """The tasks of a sweep: for each member to train, then to score."""

    def __init__(self, members: list[Member], launcher: str, folder: Path, console: Console) -> None:
        self._left = [what_is_left(member) for member in members]
        self._launcher, self._console = launcher, console
        self._logs = folder / "logs"
        self.failures: list[str] = []
        """A sentence a member."""
        self._runs: dict[str, RunFolder] = {}

    def run(self, room: int) -> None:
        """Runs what is left, as many at once as there is room for."""
        finished = [left for left in self._left if left.trained and left.scored]
        self._console.print(f"{len(finished)} of {len(self._left)} members are finished already")
        tasks = [task for left in self._left for task in self._tasks(left, room)]
        if not tasks:
            return
        self._logs.mkdir(parents=True, exist_ok=True)
        self._console.print(f"{len(tasks)} tasks, {room} cores shared; what each says is in {self._logs}")
        with Board(self._console, len(tasks)) as board:

            def begun(task: Task) -> None:
                run = self._runs.get(task.name)
                steps = read_steps.get(task.name, 1)
                board.begin(task.name, run, steps)
                if not self._console.is_terminal:
                    board.say(f"{task.name}: begun")

            def ended(task: Task, error: BaseException | None) -> None:
                board.end(task.name)
                board.say(f"{task.name}: {'done' if error is None else f'failed: {_told(error)}'}")
                if error is not None:
                    self._note(task.name, error)

            read_steps = {_training(left.member): left.member.experiment.train.steps for left in self._left}
            run_tasks(tasks, room, ended, begun, board.look)

    def _tasks(self, left: Left, room: int) -> list[Task]:
        member, pipeline = left.member, left.member.experiment.pipeline
        tasks = []
        if not left.trained:
            cores = room if room == 1 else pipeline.stages * pipeline.replicas
            after = (f"train {member.after}",) if member.after else ()
            self._runs[_training(member)] = left.run
            tasks.append(Task(_training(member), cores, lambda: self._train(member), after))
        if member.scoring is not None and not left.scored:
            scoring = member.scoring
            tasks.append(Task(f"score {member.folder}", 1, lambda: self._score(member, scoring), (_training(member),)))
        return tasks

    def _note(self, task: str, error: BaseException) -> None:
        """Keeps what went wrong: a sentence here, a bug's traceback in the log."""
        self.failures.append(f"{task} failed: {_told(error)}")
        if not isinstance(error, SuiteError):
            with self._log(task.partition(" ")[2]).open("a") as log:
                traceback.print_exception(error, file=log)
        error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold on to processes and their pipes

    def _log(self, folder: str) -> Path:
        return self._logs / f"{folder.replace('/', '-')}.log"

    def _train(self, member: Member) -> None:
        """Trains one member from where it was left."""
        folder = RUNS / member.folder
        family, _, id = member.folder.rpartition("/")
        with self._log(member.folder).open("a", buffering=1) as log:
            console = _console(log)
            if list_checkpoints(place_of_run(folder), console.print):
                resume(str(folder), "", self._launcher, console)
                return
            if folder.exists():
                console.print("it was left before its first checkpoint and is begun again")
                with held(folder):
                    shutil.rmtree(folder)
            run_experiment(member.experiment, named_run(family, id), self._launcher, console)

    def _score(self, member: Member, scoring: Scoring) -> None:
        """Scores one member, on one core: translating at one stage leaves no bubble, and the others' cores are busy."""
        assert isinstance(member.experiment, TranslationExperiment)
        with self._log(member.folder).open("a", buffering=1) as log:
            run, steps = RunFolder((RUNS / member.folder).resolve()), member.experiment.train.steps
            found = score_run(
                run, _console(log), beam=scoring.beam, languages=member.experiment.text.languages,
                max_pairs=scoring.max_pairs, stages=1,
            )  # fmt: skip
        if found["step"] < steps:
            raise CheckpointError(
                f"{run.path} was scored at step {found['step']} of {steps}, its later checkpoints are not whole; move "
                "the run away, and the sweep trains it again"
            )


def _console(log: TextIO) -> Console:
    return Console(file=log, width=120, markup=False, highlight=False, soft_wrap=True)


def _training(member: Member) -> str:
    return f"train {member.folder}"


def _told(error: BaseException) -> str:
    """Returns a fault in a line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, SuiteError) else lines[-1]  # of a worker's traceback the last says what it was
