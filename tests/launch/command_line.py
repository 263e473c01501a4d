"""The command line in tests: in this process, or in one of its own, which first imports everything again."""

import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from launch import cli
from suite.training.metrics import read_steps

ROOT = Path(__file__).parents[2]

SMALL = (
    "text.corpus=django text.vocabulary=1200 text.max_length=32 model.blocks_per_stack=2 model.feed_forward=64 "
    "train.batch_tokens=200 train.valid_pairs=40 train.checkpoint_every=3 train.threads=1 pipeline.micro_batches=3 "
    "pipeline.schedule=fill_drain optimizer.lr_decay=inverse_sqrt"
)
"""The decay does not depend on the number of steps, so runs of different lengths can be compared."""
SMALL_1F1B = SMALL.replace("fill_drain", "1f1b")


def call(*arguments, folder="."):
    """Runs the command line in this process; returns its exit code, its output and its errors.

    What its workers print is in neither."""
    out, errors = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["gpipe", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return end.value.code or 0, out.getvalue(), errors.getvalue()


def refusal(*arguments, folder="."):
    """Runs a command of a user who got something wrong in this process; returns the one sentence that says so."""
    code, _, errors = call(*arguments, folder=folder)
    assert (code, errors[:7], errors.count("\n")) == (2, "error: ", 1), errors
    return errors


def gpipe_here(folder, *arguments):
    """Runs a command that succeeds in this process, in ``folder``; returns what it printed."""
    code, out, errors = call(*arguments, folder=folder)
    assert code == 0, out + errors
    return out


def command(*arguments):
    return [sys.executable, "-m", "launch.cli", *arguments]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "WANDB_MODE": "offline"}


def gpipe(folder, *arguments, code=0, timeout_s=500):
    """Runs the command line in a process of its own, in ``folder``; returns what it printed."""
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def gpipe_at_once(folder, *commands, **variables):
    """Runs commands that succeed, one after another, in one process of their own, whose output is also that of its
    workers; returns what they printed. They measure layers quickly."""
    code = f"""
import launch.worker.measure
from tests.launch.command_line import call
from tests.quick_measuring import measure_quickly

launch.worker.measure.measure_layers = measure_quickly
for arguments in {commands!r}:
    code, out, errors = call(*arguments)
    print(out, errors, flush=True)
    assert code == 0, arguments
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=environment() | variables, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def only_run(folder):
    (run,) = Path(folder).glob("runs/*/*")
    return run


def losses(run):
    return [line["train/loss"] for line in read_steps(run / "metrics.jsonl")]
