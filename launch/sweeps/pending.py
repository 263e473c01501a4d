"""What a member of a sweep still needs: training, scoring, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from experiments.sweeps.members.base import Member, read_record
from experiments.sweeps.report.results import is_scored
from launch.runs.store import RUNS, RunFolder
from launch.watching.run_state import damage
from suite.errors import SettingError

IGNORED_SETTINGS = ("threads", "checkpoint_every", "checkpoint_dir", "max_restarts", "elastic", "device_timeout_s")
"""Those of ``train`` without effect on the result: a member's folder may differ in them."""


@dataclass(frozen=True)
class PendingMember:
    """A member and which of its parts are done."""

    member: Member
    trained: bool
    scored: bool

    @property
    def run(self) -> RunFolder:
        return RunFolder((RUNS / self.member.folder).resolve())

    @property
    def devices(self) -> int:
        pipeline = self.member.experiment.pipeline
        return 1 if self.trained else pipeline.stages * pipeline.replicas


def pending_work(member: Member) -> PendingMember:
    """Returns the state of a member; one with a damaged file is not trained, and its training names the file. Raises
    SettingError if its folder holds a run with other settings."""
    run = RunFolder((RUNS / member.folder).resolve())
    if damage(run):
        return PendingMember(member, False, False)
    if run.experiment.exists():
        _check_same(read_experiment_file(run.experiment), member.experiment, run)
    record = read_record(run.path)
    trained = record is not None and member.experiment.is_finished(record)
    scored = record is not None and is_scored(member, record, read_record(run.path, "scores.json") or {})
    return PendingMember(member, trained, trained and scored)


def _check_same(old: Experiment, new: Experiment, run: RunFolder) -> None:
    """Raises SettingError if the results of two runs would differ. The pipeline does not affect them."""
    changes = new.changes_from(old) if old.task == new.task else [f"task {old.task} -> {new.task}"]
    ignored = {"pipeline", "tracking", *(f"train.{name}" for name in IGNORED_SETTINGS)}
    differ = [line for line in changes if not {line.split()[0], line.partition(".")[0]} & ignored]
    if differ:
        raise SettingError(
            f"{run.path} holds a run with other settings (there -> here: {'; '.join(differ)}); move it away"
        )
