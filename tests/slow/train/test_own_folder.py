"""A user's file in its own folder, through Ray: relative paths, and a folder with the name of a package."""

import subprocess
import sys

from tests.launch.command_line import environment

OWN = """
from pathlib import Path
import torch
from torch import nn
from suite import TrainSpec

def small():
    x = torch.ones(int(Path("numbers/rows.txt").read_text()), 3)
    return TrainSpec(layers=[nn.Linear(3, 4), nn.Linear(4, 3)], loss=nn.MSELoss(), steps=2, stages=2, batch_size=4,
                     train=torch.utils.data.TensorDataset(x, x), settings="tracking.wandb=disabled")
"""


def test_workers_start_in_the_folder_of_the_command_and_import_their_own_packages(tmp_path):
    for path, text in (("own.py", OWN), ("numbers/rows.txt", "8"), ("datasets/__init__.py", "")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-P", "-m", "launch.cli"]  # -P, as for gpipe: the current folder is not searched
    command += ["experiment", "own.py:small", "--launcher", "ray"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert "done: 2 steps" in done.stdout, done.stdout + done.stderr
