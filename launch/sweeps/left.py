"""What is left of a member of a sweep: to train it, to score it, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.experiment import Experiment
from experiments.registry import read_experiment
from experiments.results import is_scored, read_record
from experiments.sweep import Member
from launch.runs import RUNS, RunFolder
from suite.errors import SettingError

OF_NO_EFFECT = ("threads", "checkpoint_every", "checkpoints", "restarts", "elastic")
"""Settings in which a member's folder may differ from what would be run now."""


@dataclass(frozen=True)
class Left:
    """What a member still needs."""

    member: Member
    trained: bool
    scored: bool

    @property
    def run(self) -> RunFolder:
        """Where it lies."""
        return RunFolder((RUNS / self.member.folder).resolve())


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
