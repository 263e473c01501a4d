"""The work of a sweep as data: one task trains a member, another scores it. Both are commands that a person can type.

train depth_width-laptop/t12_400m-0    gpipe resume runs/depth_width-laptop/t12_400m-0    (starts a new run, too)
score depth_width-laptop/t12_400m-0    gpipe score runs/depth_width-laptop/t12_400m-0     after it is trained
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.sweeps.members.base import Member, read_record
from experiments.sweeps.report.results import scored_step
from launch.runs.store import RunFolder
from launch.sweeps.pending import PendingMember
from suite.paths import write_atomically

WAIT_S = 1e9
"""Seconds that a member waits for devices of the cluster that others hold: it is not to give up."""


@dataclass(frozen=True, eq=False)
class Task:
    """One command of a member."""

    what: Literal["train", "score"]
    member: Member
    run: RunFolder
    devices: int
    log: Path
    after: str | None = None
    """The name of a task that must be done first. If it fails, this one is not started."""

    @property
    def name(self) -> str:
        return f"{self.what} {self.member.folder}"

    def prepare(self) -> None:
        """Makes the run's folder with its experiment, which training then starts from. Raises OSError."""
        if self.what == "train" and not self.run.experiment.exists():
            self.run.experiment.parent.joinpath("logs").mkdir(parents=True, exist_ok=True)
            write_atomically(self.run.experiment, self.member.experiment.to_toml())

    def arguments(self, launcher: str) -> list[str]:
        """Returns the command's arguments. Training takes up an interrupted run; scoring takes the checkpoint that the
        sweep compares, on one device: one stage has no bubble."""
        if self.what == "train":
            waiting = ["--set", f"train.device_timeout_s={WAIT_S:.0f}"] if launcher == "ray" else []
            return ["resume", "--launcher", launcher, *waiting, "--", str(self.run.path)]
        step = scored_step(read_record(self.run.path) or {"steps": self.member.experiment.train.steps})
        return ["score", "--set", self.scoring, "--checkpoint", str(step), "--", str(self.run.path)]

    @property
    def scoring(self) -> str:
        """The settings of scoring."""
        scoring = self.member.scoring
        assert scoring is not None
        text = getattr(self.member.experiment, "text", None)
        languages = ",".join(scoring.languages or getattr(text, "languages", None) or ()) or "none"
        pairs = "none" if scoring.max_pairs is None else scoring.max_pairs
        return f"score.beam={scoring.beam} score.max_pairs={pairs} score.languages={languages} score.stages=1"


def tasks_of(pending: Sequence[PendingMember], total: int, logs: Path) -> list[Task]:
    """Returns the tasks of unfinished members in their order of start: by priority, then those that need more of the
    ``total`` devices, then as the sweep lists them. Members with more workers than cores share all cores."""
    tasks = []
    for each in pending:
        member, log = each.member, logs / f"{each.member.folder.replace('/', '-')}.log"
        if not each.trained:
            after = f"train {member.after}" if member.after else None
            tasks.append(Task("train", member, each.run, min(each.devices, total), log, after))
        if member.scoring is not None and not each.scored:
            tasks.append(Task("score", member, each.run, 1, log, f"train {member.folder}"))
    return sorted(tasks, key=lambda task: (-task.member.priority, -task.devices))
