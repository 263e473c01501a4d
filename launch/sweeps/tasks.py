"""The work of a sweep as data: one task trains a member, another scores it. Both are commands that a person can type.

train depth_width-laptop/t12_400m-0    gpipe resume runs/depth_width-laptop/t12_400m-0    (starts a new run, too)
score depth_width-laptop/t12_400m-0    gpipe score runs/depth_width-laptop/t12_400m-0     after it is trained
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from experiments.sweeps.members.base import Member, read_record
from experiments.sweeps.report.results import is_scored, scored_step
from launch.runs.store import RUNS, RunFolder
from launch.watching.run_state import damage
from suite.errors import SettingError
from suite.paths import write_atomically

WAIT_S = 1e9
"""Seconds that a member waits for devices of the cluster that others hold or that are lost: it is not to give up."""

IGNORED_SETTINGS = ("threads", "checkpoint_every", "checkpoint_dir", "max_restarts", "elastic", "device_timeout_s")
"""Those of ``train`` without effect on the result: a member's folder may differ in them."""


@dataclass(frozen=True, eq=False)
class Task:
    """One command of a member."""

    what: Literal["train", "score"]
    member: Member
    devices: int
    log: Path
    after: str | None = None
    """The name of a task that must be done first. If it fails, this one is not started."""

    @property
    def name(self) -> str:
        return f"{self.what} {self.member.folder}"

    @property
    def run(self) -> RunFolder:
        return run_of(self.member)

    def prepare(self) -> None:
        """Makes the run's folder with its experiment, which training then starts from. Raises OSError."""
        if self.what == "train" and not self.run.experiment.exists():
            (self.run.path / "logs").mkdir(parents=True, exist_ok=True)
            write_atomically(self.run.experiment, self.member.experiment.to_toml())

    def arguments(self, launcher: str) -> list[str]:
        """Returns the command's arguments. Training starts or resumes the run. Scoring uses the checkpoint that the
        sweep compares, on one device."""
        if self.what == "train":
            waiting = ["--set", f"train.device_timeout_s={WAIT_S:.0f}"] if launcher == "ray" else []
            return ["resume", "--launcher", launcher, *waiting, "--", str(self.run.path)]
        step = scored_step(read_record(self.run.path) or {"steps": self.member.experiment.train.steps})
        return ["score", "--set", self._scoring, "--checkpoint", str(step), "--", str(self.run.path)]

    @property
    def _scoring(self) -> str:
        scoring, text = self.member.scoring, getattr(self.member.experiment, "text", None)
        assert scoring is not None
        languages = ",".join(scoring.languages or getattr(text, "languages", None) or ()) or "none"
        pairs = "none" if scoring.max_pairs is None else scoring.max_pairs
        return f"score.beam={scoring.beam} score.max_pairs={pairs} score.languages={languages} score.stages=1"


def run_of(member: Member) -> RunFolder:
    return RunFolder((RUNS / member.folder).resolve())


def tasks_of(member: Member, logs: Path) -> list[Task]:
    """Returns what a member still needs; nothing once it is trained and scored. One with a damaged file is not trained,
    and its training names the file.

    Raises SettingError if its folder holds a run with other settings.
    """
    run, pipeline = run_of(member), member.experiment.pipeline
    log = logs / f"{member.folder.replace('/', '-')}.log"
    after = f"train {member.after}" if member.after else None
    train = Task("train", member, pipeline.stages * pipeline.replicas, log, after)
    score = [] if member.scoring is None else [Task("score", member, 1, log, train.name)]
    if damage(run):
        return [train, *score]
    if run.experiment.exists():
        _check_same(read_experiment_file(run.experiment), member.experiment, run)
    record = read_record(run.path)
    if record is None or not member.experiment.is_finished(record):
        return [train, *score]
    return [] if is_scored(member, record, read_record(run.path, "scores.json") or {}) else score


def in_order(tasks: Iterable[Task], total: int) -> list[Task]:
    """Returns tasks in their order of start: by priority, then those that need more of the ``total`` devices, then as
    the sweep lists them. Members with more workers than cores share all cores."""
    capped = [replace(task, devices=min(task.devices, total)) for task in tasks]
    return sorted(capped, key=lambda task: (-task.member.priority, -task.devices))


def _check_same(old: Experiment, new: Experiment, run: RunFolder) -> None:
    """Raises SettingError if the results of two runs would differ. The pipeline does not affect them."""
    changes = new.changes_from(old) if old.task == new.task else [f"task {old.task} -> {new.task}"]
    ignored = {"pipeline", "tracking", *(f"train.{name}" for name in IGNORED_SETTINGS)}
    if differ := [line for line in changes if not {line.split()[0], line.partition(".")[0]} & ignored]:
        raise SettingError(
            f"{run.path} holds a run with other settings (there -> here: {'; '.join(differ)}); move it away"
        )
