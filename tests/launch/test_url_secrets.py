"""A URL with a password and a signature: the run uses it, and nothing that people read has it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.launch.test_run import OWN

SECRET = "hunter2"

URL = f"file://me:{SECRET}@store/x?sig={SECRET}"  # fsspec takes all of it as a folder's name


def gpipe(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "WANDB_MODE": "offline"}, timeout=200,
    )  # fmt: skip
    assert SECRET not in done.stdout + done.stderr
    return done


def test_a_run_resumes_from_a_url_whose_secrets_are_never_shown(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = f"train.checkpoint_dir={URL} train.steps=2 train.checkpoint_every=1"
    done = gpipe(tmp_path, "experiment", "own.py:small", "--launcher", "local", "--set", settings)
    assert done.returncode == 0, done.stderr
    (experiment,) = tmp_path.glob("runs/small/*/experiment.toml")
    run = experiment.parent
    done = gpipe(tmp_path, "resume", run.name, "--launcher", "local", "--set", "train.steps=3")
    assert "resumed at step 2" in done.stdout, done
    assert "file://***@store/x?***" in gpipe(tmp_path, "checkpoints", run.name).stdout
    gpipe(tmp_path, "report", "--run", run.name)
    gpipe(tmp_path, "report", "--run", f"{run.name} {run.name}")
    manifest = next(tmp_path.glob(f"*{SECRET}*/**/00000003/manifest.json"))
    manifest.write_text("")
    done = gpipe(tmp_path, "resume", run.name, "--launcher", "local", "--set", "train.steps=4")
    assert "checkpoint file://***@store/x?***" in done.stdout, done
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [experiment]
    assert stat.S_IMODE(experiment.stat().st_mode) == 0o600
