"""Adds results to a run's wandb run after its workers have ended, in a separate process
(``launch.tracking.wandb_writer``).

A separate process, because several runs of a sweep may end at once while wandb supports one run per process, and
because the command must not wait longer than ``LIMIT_S`` if wandb hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from experiments.registry import read_experiment_file
from launch.runs.store import RunFolder
from suite.log import Log
from suite.training.wandb_run import Identity, wandb_mode

LIMIT_S = 150
"""Seconds for the process; up to 80 of them to open the run and to upload its remaining data."""


def publish(run: RunFolder, what: str, log: Log) -> None:
    """Adds ``what``, ``end`` or ``scores``, to a run's wandb run if it has one. A failure is only logged."""
    mode = wandb_mode(read_experiment_file(run.experiment).tracking)
    if Identity.read(run.path) is None or mode == "disabled":
        return
    command = [sys.executable, "-m", "launch.tracking.wandb_writer", str(run.path), what, mode]
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
