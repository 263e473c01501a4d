"""A URL with a password and a signature: the run uses it, and nothing that people read has it."""

import stat

import pytest

from tests.launch.command_line import call
from tests.launch.test_run import OWN

SECRET = "hunter2"

URL = f"file://me:{SECRET}@store/x?sig={SECRET}"  # fsspec takes all of it as a folder's name


PRINTS_INTO_A_FILE = """
import multiprocessing, os
from pathlib import Path

if multiprocessing.parent_process():  # a worker
    printed = os.open(Path(__file__).with_name("printed"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    print("a worker", flush=True)
"""


def shown(folder, *arguments, code=0):
    """Runs a command; returns what it printed."""
    found, out, errors = call(*arguments, folder=folder)
    assert SECRET not in out + errors
    assert found == code, out + errors
    return out


@pytest.mark.slow
def test_a_run_resumes_from_a_url_whose_secrets_are_never_shown(tmp_path):
    (tmp_path / "own.py").write_text(PRINTS_INTO_A_FILE + OWN)
    settings = f"train.checkpoint_dir={URL} train.steps=2 train.checkpoint_every=1"
    shown(tmp_path, "experiment", "own.py:small", "--launcher", "local", "--set", settings)
    (experiment,) = tmp_path.glob("runs/small/*/experiment.toml")
    run = experiment.parent
    assert "resumed at step 2" in shown(tmp_path, "resume", run.name, "--launcher", "local", "--set", "train.steps=3")
    assert "file://***@store/x?***" in shown(tmp_path, "checkpoints", run.name)
    shown(tmp_path, "report", "--run", run.name)
    manifest = next(tmp_path.glob(f"*{SECRET}*/**/00000003/manifest.json"))
    manifest.write_text("")
    out = shown(tmp_path, "resume", run.name, "--launcher", "local", "--set", "train.steps=4")
    assert "checkpoint file://***@store/x?***" in out
    printed = (tmp_path / "printed").read_text()
    assert printed.count("a worker\n") >= 3
    assert SECRET not in printed
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [experiment]
    assert stat.S_IMODE(experiment.stat().st_mode) == 0o600
