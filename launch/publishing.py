"""Has a process of its own add to a run's wandb run once its workers have ended (``launch.wandb_part``).

Several runs of a sweep may end at once, and a process has one run of wandb's at a time; and whatever befalls wandb, the
command waits no longer than ``LIMIT_S``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from experiments.registry import read_experiment
from launch.logged import run_logged
from launch.runs import RunFolder
from suite.training.wandb_run import Identity, wandb_mode

LIMIT_S = 150
"""Seconds: to open a run and to send what is left of it have 80."""


def publish(run: RunFolder, what: str, say: Callable[[str], None]) -> None:
    """Adds ``what``, ``end`` or ``scores``, to a run's wandb run if it has one. A failure is told, and is no more."""
    mode = wandb_mode(read_experiment(run.experiment.read_text()).tracking)
    if Identity.of(run.path) is None or mode == "disabled":
        return
    command = [sys.executable, "-m", "launch.wandb_part", str(run.path), what, mode]
    try:
        code = run_logged(command, run, LIMIT_S)
        why = f"nothing came of it in {LIMIT_S} s" if code is None else _last_line(run.wandb_log)
    except OSError as error:
        code, why = None, str(error)
    if code != 0:
        say(f"wandb failed ({why}); what it was to be told is in {run.path}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
