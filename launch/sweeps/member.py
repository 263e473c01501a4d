"""What to do with a member, and its scoring: in this process, or in a Ray task, which reserves one device."""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from rich.console import Console

from experiments.registry import read_experiment
from experiments.sweeps.members.base import Scoring, read_record
from experiments.sweeps.report.results import scored_step
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.score_settings import ScoreSettings
from launch.inference.score import score_run
from launch.runs.store import RUNS, RunFolder
from launch.sweeps.devices import cluster_devices
from launch.terminal import Terminal
from suite.errors import BusyError, CheckpointError, SuiteError, WorkerError, first_line

MAX_SCORING_S = 7 * 86400.0
"""Seconds to score one member."""


@dataclass(frozen=True)
class MemberSpec:
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
        return json.dumps(asdict(self)) + "\n"  # ASCII, whatever is in a path

    @staticmethod
    def of_line(line: str) -> MemberSpec:
        return TypeAdapter(MemberSpec).validate_json(line)


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


def score_on_ray(spec: MemberSpec) -> None:
    """Scores a member and prints the task's output.

    Raises BusyError when no device is free, WorkerError when the task's process or node is lost, and the errors of
    scoring.
    """
    import ray

    from launch.backends.ray_connection import START_DEADLINE, Connection

    with closing(Connection()) as connection:
        devices = cluster_devices(connection)
        kind = devices.kind
        if not devices.free:
            raise BusyError(f"none of the Ray cluster's {devices} is free")
        started_file = Path(spec.outcome_file).resolve().with_suffix(".started")  # exists once the task has its device
        started_file.unlink(missing_ok=True)
        device = {"num_cpus": 1} if kind == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        task = ray.remote(_score).options(max_retries=0, **device)
        result = task.remote(spec.as_line(), os.getcwd(), str(started_file))
        start = time.monotonic()
        while not ray.wait([result], timeout=1.0)[0]:
            waited = time.monotonic() - start
            if waited > (MAX_SCORING_S if started_file.exists() else START_DEADLINE):
                ray.cancel(result, force=True)
                if not started_file.exists():
                    raise BusyError(f"no {kind} of the Ray cluster became free within {waited:.0f} s")
                raise WorkerError(f"scoring took longer than {MAX_SCORING_S:.0f} s and was stopped")
        try:
            print(ray.get(result))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, SuiteError) else error) from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the scoring process died: {first_line(error)}") from None


def _score(line: str, folder: str, started_file: str) -> str:
    """The Ray task: scores in the sweep's folder and returns its output."""
    Path(started_file).touch()
    os.chdir(folder)
    output = io.StringIO()
    score(MemberSpec.of_line(line), log_console(output))
    return output.getvalue()
