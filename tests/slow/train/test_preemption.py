"""SIGTERM of a scheduler: a run saves after its step, ends with 143, and goes on with the same bits."""

import os
import signal
import sys
import time

import pytest

from launch.runs.store import RunFolder
from launch.supervision.attempt_log import read_attempt_lines
from tests.launch.backends.test_env_ranks import OWN
from tests.launch.command_line import command, gpipe_here, losses
from tests.slow.running import Running

LONG = OWN.replace("steps=6", "steps=1000000").replace("checkpoint_every=2", "checkpoint_every=1000000")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch.cli"]


@pytest.mark.parametrize(
    ("launcher", "to"), [("local", "command"), ("local", "group"), ("ray", "command"), ("env", "command")]
)
def test_a_run_saves_and_goes_on_with_the_same_bits(launcher, to, tmp_path, ended):
    (tmp_path / "own.py").write_text(LONG)
    start = TORCHRUN if launcher == "env" else command()
    running = ended(Running(tmp_path, [*start, "experiment", "own.py:small", "--launcher", launcher]))
    running.until(lambda: any("first_step_s" in path.read_text() for path in tmp_path.glob("runs/*/*/attempts.jsonl")))
    time.sleep(1.5)  # all ranks know that they train
    (os.killpg if to == "group" else os.kill)(running.process.pid, signal.SIGTERM)
    code = running.process.wait(25)  # torchrun kills after 30 s
    (path,) = tmp_path.glob("runs/small/*")
    run = RunFolder(path)
    saved = max(int(manifest.parent.name) for manifest in run.checkpoints.glob("*/manifest.json"))
    assert len(losses(path)) == saved
    assert [line["outcome"] for line in read_attempt_lines(run.attempts).values()] == ["interrupted"]
    assert not run.record.exists()
    if launcher != "env":  # torchrun has a code of its own
        assert code == 143, running.printed
        assert running.printed.splitlines()[-1].endswith(f"continues from the checkpoint of step {saved}")
    steps = f"train.steps={saved + 3}"
    gpipe_here(tmp_path, "resume", str(path), "--launcher", "local", "--set", steps)
    undisturbed = gpipe_here(tmp_path, "experiment", "own.py:small", "--launcher", "local", "--set", steps)
    (other,) = (each for each in tmp_path.glob("runs/small/*") if each != path)
    assert losses(path) == losses(other), undisturbed
