"""The command line in this process, where many short commands would wait for imports, and in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.launch.command_line import ROOT, call
from tests.slow.running import Running

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "160",
    "TERM": "dumb",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "RAY_ADDRESS": "",
}
"""The environment of all commands."""


def printed(folder: Path, *arguments: str) -> list[str]:
    """Returns the lines that a command prints, without the folder's path; those of its errors if it fails."""
    code, out, errors = call(*arguments, folder=folder)
    text = out if code == 0 else f"exit code {code}\n{errors}"
    return text.replace(str(folder), "FOLDER").splitlines()


def start(folder: Path, *arguments: str, prefix: Sequence[str] = (), **variables: str) -> Running:
    """Starts a command in a process of its own; ``prefix`` are modules of Python that start it."""
    program = [sys.executable, *prefix, "-m", "launch.cli", *arguments]
    return Running(folder, program, **(ENVIRONMENT | variables))


def finish(running: Running, timeout_s: float = 600) -> None:
    """Waits for a command. Raises an error with the end of what it printed if it fails."""
    try:
        code = running.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = kill(running)
    if code:
        raise RuntimeError(f"exit code {code}: {' '.join(running.printed.split())[-600:]}")


def kill(running: Running) -> int:
    """Kills a command with its processes; returns its exit code."""
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    return running.process.wait()
