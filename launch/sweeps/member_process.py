"""Trains or resumes one member of a sweep, or scores it.

On Ray and on GPUs each member is a process, ``python -m launch.sweeps.member_process``, because a process has one
connection to Ray and one view of the GPUs. It reads its MemberSpec, a line, from standard input, which then stays open:
at end of file the sweep is dead, and the member exits too. Its output is its log; its outcome is in a file unless it is
killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.base.score_settings import ScoreSettings
from experiments.registry import read_experiment
from experiments.sweeps.members.base import Scoring, read_record
from experiments.sweeps.report.results import scored_step
from experiments.translation.experiment import TranslationExperiment
from launch import interrupts
from launch.inference.score import score_run
from launch.runs.checkpoints import checkpoint_location_of_run
from launch.runs.store import RUNS, RunFolder, named_run, run_lock
from launch.sweeps.retries import decide_retry, message_of
from launch.terminal import Terminal
from launch.train.command import resume, run_experiment
from suite.errors import CheckpointError, SuiteError
from suite.paths import write_atomically
from suite.training.checkpoint import Storage, folders_of

END_S = 5.0
"""Seconds for a member to end its workers and itself."""


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
    started_file: str
    """Exists once scoring has its device."""
    scoring: Scoring | None = None

    def as_line(self) -> str:
        """Returns a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of_line(cls, line: str) -> MemberSpec:
        """Parses a line of ``as_line``."""
        values: dict[str, Any] = json.loads(line)
        scoring = values.pop("scoring")
        return cls(**values, scoring=Scoring(**scoring) if scoring else None)


def run_member(spec: MemberSpec, console: Console) -> None:
    """Trains or scores a member. Raises a SuiteError for a fault that is not a bug."""
    if spec.what == "train":
        _train(spec, console)
    elif spec.launcher == "ray":
        from launch.sweeps.ray_scoring import score_on_ray

        score_on_ray(spec)
    else:
        score(spec, console)


def _train(spec: MemberSpec, console: Console) -> None:
    folder = RUNS / spec.folder
    family, _, id = spec.folder.rpartition("/")
    if folders_of(Storage(checkpoint_location_of_run(folder))):  # valid or not
        resume(str(folder), "", spec.launcher, console)
        return
    if folder.exists():
        with run_lock(folder):
            backup = folder.with_name(f"{folder.name}-set-aside-{time.strftime('%Y%m%d-%H%M%S')}")
            folder.rename(backup)
        console.print(f"it stopped before its first checkpoint: moved to {backup} and restarted")
    run_experiment(read_experiment(spec.experiment), named_run(family, id), spec.launcher, console)


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
    """Returns a console that writes to a log file."""
    return Terminal(file=file, width=120)


def main() -> None:
    """Runs the MemberSpec on standard input. Exit codes: 0 done, 1 failed, 130 interrupted."""
    interrupts.install()
    spec = MemberSpec.of_line(_read_spec_line())
    threading.Thread(target=_exit_with_sweep, daemon=True).start()
    outcome_file = Path(spec.outcome_file)
    try:
        with interrupts.interruptible():
            run_member(spec, log_console(sys.stdout))
    except BaseException as error:
        if interrupts.was_interrupted():
            interrupts.kill_children_and_exit()
        if not isinstance(error, Exception):
            raise
        if isinstance(error, SuiteError):
            print(f"error: {error}")
        else:
            traceback.print_exc()
        failure = {"message": message_of(error), "retry": decide_retry(error).value}
        write_atomically(outcome_file, json.dumps(failure) + "\n")
        sys.exit(1)
    write_atomically(outcome_file, "{}\n")


def _read_spec_line() -> str:
    """Reads a line without sys.stdin's buffer: a thread waiting for more would hold its lock at exit."""
    received_bytes = b""
    while not received_bytes.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            sys.exit(130)  # the sweep ended meanwhile
        received_bytes += chunk
    return received_bytes.decode()


def _exit_with_sweep() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
