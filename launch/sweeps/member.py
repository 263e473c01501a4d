"""What to do with a member, and its scoring, which a process of this machine or a Ray task does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console

from experiments.base.score_settings import ScoreSettings
from experiments.registry import read_experiment
from experiments.sweeps.members.base import Scoring, read_record
from experiments.sweeps.report.results import scored_step
from experiments.translation.experiment import TranslationExperiment
from launch.inference.score import score_run
from launch.runs.store import RUNS, RunFolder
from launch.terminal import Terminal
from suite.errors import CheckpointError


@dataclass(frozen=True)
class MemberSpec:
    """What to do with a member."""

    what: Literal["train", "score"]
    folder: str
    """Relative to the folder of all runs."""
    experiment: str
    """The content of experiment.toml."""
    launcher: str
    outcome_file: str
    """Where the process writes its outcome."""
    scoring: Scoring | None = None

    def as_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of_line(cls, line: str) -> MemberSpec:
        """Parses a line of ``as_line``."""
        values: dict[str, Any] = json.loads(line)
        scoring = values.pop("scoring")
        return cls(**values, scoring=Scoring(**scoring) if scoring else None)


def score(spec: MemberSpec, console: Console) -> None:
    """Scores a member on one device: one stage has no bubble, and the other devices are busy."""
    experiment, scoring = read_experiment(spec.experiment), spec.scoring
    assert isinstance(experiment, TranslationExperiment)
    assert scoring is not None
    run = RunFolder((RUNS / spec.folder).resolve())
    languages = scoring.languages or experiment.text.languages
    settings = ScoreSettings(beam=scoring.beam, languages=languages, max_pairs=scoring.max_pairs, stages=1)
    scores = score_run(run, settings, console)
    wanted = scored_step(read_record(run.path) or {"steps": experiment.train.steps})
    if scores["step"] != wanted:
        raise CheckpointError(
            f"{run.path} was scored at step {scores['step']} instead of {wanted}, because that checkpoint is missing "
            "or invalid; move the run away, and the sweep trains it again"
        )


def log_console(file: Any) -> Console:
    return Terminal(file=file, width=120)
