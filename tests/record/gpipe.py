"""The command line in this process, where many short commands would wait for imports, and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[2]

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "160",
    "TERM": "dumb",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "RAY_ADDRESS": "",
}
"""The environment of all commands."""


def command(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs a command in this process; returns its exit code, what it printed, and its errors."""
    from launch import cli

    out, errors, before = StringIO(), StringIO(), sys.argv
    sys.argv = ["gpipe", *arguments]
    try:
        with chdir(folder), redirect_stdout(out), redirect_stderr(errors):
            cli.main()
    except SystemExit as end:
        return int(end.code or 0), out.getvalue(), errors.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("a command exits")


def printed(folder: Path, *arguments: str) -> list[str]:
    """Returns the lines that a command prints, without the folder's path; those of its errors if it fails."""
    code, out, errors = command(folder, *arguments)
    text = out if code == 0 else f"exit code {code}\n{errors}"
    return text.replace(str(folder), "FOLDER").splitlines()


def start(folder: Path, *arguments: str, prefix: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    """Starts a command in a process group of its own; ``prefix`` are modules of Python that start it."""
    log = (folder / "command.log").open("a")
    return subprocess.Popen(
        [sys.executable, *prefix, "-m", "launch.cli", *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT | variables,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], folder: Path, timeout_s: float = 600) -> None:
    """Waits for a command. Raises RuntimeError with the end of what it printed if it fails."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        code = process.wait()
    if code:
        raise RuntimeError(f"exit code {code}: {' '.join((folder / 'command.log').read_text().split())[-600:]}")
