"""Adds results to a run's wandb run after its workers have ended, in a process of its own, which runs this file:

python -m launch.tracking.wandb_finish runs/<name>/<id> end offline       plan, experiment, plot of a step
python -m launch.tracking.wandb_finish runs/<name>/<id> scores offline    score tables by language, direction and third

Several runs of a sweep may end at once while wandb supports one run per process, and the command must not wait longer
than ``LIMIT_S`` if wandb hangs. The process reads only the run's folder, and imports little, because each run waits for
it at its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.runs.store import RunFolder
from suite.log import Log
from suite.paths import hide_secrets
from suite.training.metrics import STEP
from suite.training.wandb_run import Identity, open_run, wandb_mode

LIMIT_S = 150
"""Seconds for the process; up to 80 of them to open the run and to upload its remaining data."""


def publish(run: RunFolder, what: str, log: Log) -> None:
    """Adds ``what``, ``end`` or ``scores``, to a run's wandb run if it has one. A failure is only logged."""
    from experiments.registry import read_experiment_file

    mode = wandb_mode(read_experiment_file(run.experiment).tracking)
    if Identity.read(run.path) is None or mode == "disabled":
        return
    command = [sys.executable, "-P", "-m", "launch.tracking.wandb_finish", str(run.path), what, mode]
    try:
        code = run_logged(command, run, LIMIT_S)
        printed = run.wandb_log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        reason = f"it did not finish within {LIMIT_S} s" if code is None else printed[-1]
    except OSError as error:
        code, reason = None, str(error)
    if code != 0:
        log(f"wandb failed ({reason}); the data that it did not get is in {run.path}")


def run_logged(command: list[str], run: RunFolder, limit_s: float, **variables: str) -> int | None:
    """Runs a command with its output in a log file of a run's folder; returns its exit code, None after ``limit_s``.

    On a timeout it kills the whole process group, because wandb starts a child process.
    """
    run.wandb_log.parent.mkdir(exist_ok=True)
    with run.wandb_log.open("a") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _add_end(run: RunFolder, wandb_run: Any) -> None:
    import wandb

    steps = json.loads(run.record.read_text())["steps"]
    if run.timeline.exists():
        wandb_run.log({STEP: steps, "pipeline/timeline": wandb.Image(str(run.timeline))})
    for kind, files in {
        "plan": (run.plan_text, run.plan_json, run.experiment),
        "timeline": (run.timeline, run.perfetto),
    }.items():
        artifact = wandb.Artifact(f"{kind}-{wandb_run.id}", type=kind)
        existing = [file for file in files if file.exists()]
        for file in existing:
            if file == run.experiment:
                with artifact.new_file(file.name) as copy:
                    copy.write(hide_secrets(file.read_text()))
            else:
                artifact.add_file(str(file))
        if existing:
            wandb_run.log_artifact(artifact)


def _add_scores(run: RunFolder, wandb_run: Any) -> None:
    import wandb

    record = json.loads(run.scores.read_text())
    rows = list(_score_rows(record))
    macro = record["macro"]
    thirds = [[measure, *means.values()] for measure, means in macro.items()]
    wandb_run.log(
        {
            STEP: record["step"],
            "scores/languages": wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows]),
            "scores/thirds": wandb.Table(columns=["measure", *macro["bleu"]], data=thirds),
            **{f"scores/{measure}": means["all"] for measure, means in macro.items()},
        }
    )


def _score_rows(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row for each language and direction of a run's ``scores.json``."""
    for direction, scores in record["directions"].items():
        source, _, target = direction.partition("-")
        language = target if target in record["thirds"] else source
        yield {
            "language": language, "direction": direction, "third": record["thirds"][language], "pairs": scores["pairs"],
            "train_pairs": scores["train_pairs"], "BLEU": scores["bleu"], "chrF": scores["chrf"],
            "BLEU signature": record["signatures"]["bleu"], "chrF signature": record["signatures"]["chrf"],
        }  # fmt: skip


def main(folder: str, what: str, mode: str) -> None:
    """Adds the results ``what``; exits with a message if that fails."""
    run = RunFolder(Path(folder))
    identity = Identity.read(run.path)
    if identity is None:
        sys.exit(f"{folder} has no wandb run")
    # staging folder of artifacts, by default in the home directory
    os.environ.setdefault("WANDB_DATA_DIR", str(run.path / "wandb" / "data"))
    try:
        wandb_run = open_run(run.path, mode, identity)
        {"end": _add_end, "scores": _add_scores}[what](run, wandb_run)
        wandb_run.finish()
    except Exception as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
