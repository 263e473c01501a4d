"""A URL with a password and a signature: the run uses it, and nothing that people read has it."""

import stat
import subprocess

from tests.launch.command_line import call, command, environment
from tests.launch.test_run import OWN

SECRET = "hunter2"

URL = f"file://me:{SECRET}@store/x?sig={SECRET}"  # fsspec takes all of it as a folder's name


def with_workers(folder, *arguments):
    """Runs a command in a process of its own, whose output is also that of its workers; returns what it printed."""
    done = subprocess.run(
        command(*arguments, "--launcher", "local"), cwd=folder, env=environment(), capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert SECRET not in done.stdout + done.stderr
    assert done.returncode == 0, done
    return done.stdout


def without_workers(folder, *arguments):
    code, out, errors = call(*arguments, folder=folder)
    assert SECRET not in out + errors
    return code, out


def test_a_run_resumes_from_a_url_whose_secrets_are_never_shown(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = f"train.checkpoint_dir={URL} train.steps=2 train.checkpoint_every=1"
    with_workers(tmp_path, "experiment", "own.py:small", "--set", settings)
    (experiment,) = tmp_path.glob("runs/small/*/experiment.toml")
    run = experiment.parent
    assert "resumed at step 2" in with_workers(tmp_path, "resume", run.name, "--set", "train.steps=3")
    assert "file://***@store/x?***" in without_workers(tmp_path, "checkpoints", run.name)[1]
    assert without_workers(tmp_path, "report", "--run", run.name)[0] == 0
    assert without_workers(tmp_path, "report", "--run", f"{run.name} {run.name}")[0] == 0
    manifest = next(tmp_path.glob(f"*{SECRET}*/**/00000003/manifest.json"))
    manifest.write_text("")
    _, out = without_workers(tmp_path, "resume", run.name, "--launcher", "local", "--set", "train.steps=4")
    assert "checkpoint file://***@store/x?***" in out
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [experiment]
    assert stat.S_IMODE(experiment.stat().st_mode) == 0o600
