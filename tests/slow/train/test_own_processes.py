"""Processes that a model's own file starts work as in plain Python, and none is left when its run ends."""

import re
import signal
import sys
import time

import pytest

from tests.slow.interrupted_command import Command

OWN = """
import multiprocessing, os, signal, subprocess, sys, threading, time
import torch
from torch import nn
torch.set_grad_enabled(False)  # as some libraries do
from torch.utils.data import DataLoader, Dataset
from suite import TrainSpec

class Rows(Dataset):
    def __init__(self, step):
        self.x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, row):
        return self.x[row], self.x[row]

KEPT = []

def batch(step):
    with multiprocessing.Pool(2) as pool:  # leaving it sends SIGTERM
        assert pool.map(abs, [-1, -2]) == [1, 2]
    if os.fork() == 0:
        sys.exit()
    if not KEPT:
        KEPT.append(iter(DataLoader(Rows(0), num_workers=1, persistent_workers=True)))
        KEPT.append(multiprocessing.Pool(1))
        for daemon in (True, False):
            KEPT.append(multiprocessing.Process(target=time.sleep, args=(600,), daemon=daemon))
            KEPT[-1].start()
        threading.Thread(target=time.sleep, args=(600,)).start()
        if multiprocessing.parent_process():
            KEPT.append(subprocess.Popen(["sleep", "600"]))
    if step == 3:
        {end}
    return next(iter(DataLoader(Rows(step), batch_size=8, num_workers=1)))

def own():
    settings = "train.max_restarts=0 tracking.wandb=disabled"
    return TrainSpec(layers=nn.Sequential(nn.Linear(3, 3)), loss=nn.MSELoss(), train=batch, batch_size=8, steps=4,
                     stages=1, micro_batches=2, settings=settings)
"""
"""The file's thread and process that do not end are also in the command itself, which makes the first mini-batch."""

ENDS = {
    "pass": (0, r"peak memory of all workers"),
    "raise OSError('no disk')": (2, r"error: the mini-batch of step 4 cannot be read: OSError: no disk"),
    "os.kill(os.getpid(), signal.SIGKILL)": (2, r"process was killed by SIGKILL"),
    "open('here', 'w').close(), time.sleep(600)": (130, r"interrupted; "),
}


@pytest.mark.parametrize("end", ENDS)
def test_processes_of_the_users_file_work_and_end_with_the_run(tmp_path, ended, end):
    (tmp_path / "own.py").write_text(OWN.replace("{end}", end))
    closed = ("sh", "-c", 'exec "$0" -m launch.cli "$@" >&-', sys.executable) if "raise" in end else ()
    command = ended(Command(tmp_path, ["experiment", "own.py:own", "--launcher", "local"], *filter(None, [closed])))
    command.wait_for((tmp_path / "here").exists)
    if command.process.poll() is None:
        command.interrupt(signal.SIGINT, "once")
    code, said = ENDS[end]
    assert (command.process.wait(60), bool(re.search(said, command.printed))) == (code, True), command.printed
    time.sleep(0.5)
    assert not command.live_processes(), command.printed
    assert "Traceback" not in command.printed
    assert "forkserver:" not in command.printed
