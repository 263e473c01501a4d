"""``from launch import run``: a file that trains itself, and errors that its author can catch."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from launch import run
from suite.errors import SettingError

OWN = """
import sys
import torch
from torch import nn
from suite import TrainSpec
from launch import run
from suite.errors import SuiteError

def small():
    x = torch.randn(8, 3)
    return TrainSpec(layers=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), loss=nn.MSELoss(),
                     train=list(zip(x, x)), batch_size=4, micro_batches=2, steps=1)

def guarded():
    try:
        run(small, "train.step=3")
    except SuiteError as error:
        print("caught:", error)
    done = run(small, "train.steps=3 pipeline.micro_batches=auto tracking.wandb=disabled")
    print("result:", done.record["steps"], done.record["K"])
    print("chosen:", [line for line in (done.folder / "experiment.toml").read_text().splitlines() if "micro_" in line])
    print("folder:", (done.folder / "metrics.jsonl").exists(), "ray" in sys.modules)

if __name__ == "__main__":
    guarded()
"""


def python(folder, name):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, name], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip


@pytest.mark.slow
def test_a_file_trains_what_it_defines(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    for name in ("datasets", "deepspeed", "safetensors"):  # packages of the environment, which workers import
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    done = python(tmp_path, "own.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "caught: train.step is not a setting; did you mean train.steps" in done.stdout
    assert "result: 3 1" in done.stdout
    assert re.search(r"chosen: .*'micro_batches = [124]'\]", done.stdout), "by the plan, of 4 rows"
    assert "folder: True False" in done.stdout, "the run's files; no ray"


@pytest.mark.slow
def test_a_file_that_calls_run_when_it_is_imported_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace('if __name__ == "__main__":\n    guarded()', "run(small)"))
    done = python(tmp_path, "own.py")
    assert "own.py cannot be imported at line 24: SettingError: run is called while the file is imported" in done.stderr


def nested():
    def inner():
        raise AssertionError

    return inner


@pytest.mark.parametrize("function", [lambda: None, nested(), "digits"])
def test_what_workers_cannot_import_is_refused(function):
    with pytest.raises(SettingError, match="is no function of a file that workers can import"):
        run(function)


def test_a_function_of_a_shell_is_refused(monkeypatch):
    shell = ModuleType("__main__")  # it has no file
    monkeypatch.setitem(sys.modules, "__main__", shell)
    exec("def digits(): pass", shell.__dict__)
    with pytest.raises(SettingError, match="digits is defined in a shell or a notebook; write it into a file"):
        run(shell.digits)


def test_an_unknown_launcher_is_refused():
    with pytest.raises(SettingError, match="unknown launcher 'loacl'; did you mean local"):
        run(nested, launcher="loacl")
