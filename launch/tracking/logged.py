"""Runs a program with a time limit, and logs its output to a run's folder."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from launch.runs.store import RunFolder


def run_logged(command: list[str], run: RunFolder, limit_s: float, **variables: str) -> int | None:
    """Runs a command with its output in a log file of a run's folder; returns its exit code, None after ``limit_s``.

    On a timeout it kills the whole process group, because wandb starts a child process.
    """
    run.wandb_log.parent.mkdir(exist_ok=True)
    with run.wandb_log.open("a") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | variables,
            start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
