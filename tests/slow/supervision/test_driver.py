"""The driver is killed: its workers end by themselves, and a resume loses nothing beyond the last manifest."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from suite.training.metrics import read_steps
from tests.launch.command_line import SMALL_1F1B, environment, gpipe, only_run

GONE_S = 30.0
AGENTS_S = 180.0
"""Two agents of a Ray that was started here try for a minute to tell its head of the death, which is dead as well."""
AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")


def family(pid):
    """Returns all processes below one."""
    return psutil.Process(pid).children(recursive=True)


def ports(processes):
    """Returns those that processes listen at."""
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def still_held(listening, killed_at):
    """Returns the ports at which a process that is older than the kill listens: a younger one may take a free port."""
    all_ports = psutil.net_connections("inet")
    holders = {each.laddr.port: each.pid for each in all_ports if each.status == psutil.CONN_LISTEN and each.pid}
    return {port for port in listening & holders.keys() if psutil.Process(holders[port]).create_time() < killed_at}


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_killed_driver_leaves_no_process_and_its_run_goes_on(tmp_path, launcher):
    settings = f"{SMALL_1F1B} pipeline.stages=2 tracking.wandb=disabled"
    command = [sys.executable, "-m", "launch.cli", "experiment", "t24_1_3b_wide", "--scale", "laptop"]
    command += ["--launcher", launcher, "--set", f"{settings} train.steps=100000"]
    driver = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 180
    while not list(tmp_path.glob("runs/*/*/checkpoints/00000009/manifest.json")):
        assert time.monotonic() < until, "no checkpoint in time"
        assert driver.poll() is None
        time.sleep(0.1)
    below = family(driver.pid)
    assert len(below) > 2
    held, agents = ports(below), [process for process in below if process.name().startswith(AGENTS)]
    os.kill(driver.pid, signal.SIGKILL)
    begin, killed_at = time.monotonic(), time.time()
    driver.wait()
    _, alive = psutil.wait_procs([process for process in below if process not in agents], GONE_S)
    assert not alive, [process.cmdline() for process in alive]
    print(f"{launcher}: all but {len(agents)} agents of Ray gone after {time.monotonic() - begin:.1f} s")
    _, alive = psutil.wait_procs(agents, AGENTS_S)
    assert not alive, [process.cmdline() for process in alive]
    print(f"{launcher}: {len(below)} processes and {len(held)} ports gone after {time.monotonic() - begin:.1f} s")
    assert not still_held(held, killed_at)
    run = only_run(tmp_path)
    newest = max(int(path.parent.name) for path in run.glob("checkpoints/*/manifest.json"))
    steps = newest + 6
    said = gpipe(tmp_path, "resume", run.name, "--launcher", launcher, "--set", f"train.steps={steps}")
    assert f"resumed at step {newest}" in said
    lines = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [line["attempt"] for line in lines if "began" in line] == [1, 2]
    assert [line["start"] for line in lines if line.get("outcome") == "done"] == [newest]
    whole = tmp_path / "whole"
    whole.mkdir()
    gpipe(whole, "experiment", "t24_1_3b_wide", "--scale", "laptop", "--launcher", "local", "--set",
          f"{settings} train.steps={steps}")  # fmt: skip
    assert losses(run) == losses(only_run(whole))


def losses(run: Path):
    return [line["train/loss"] for line in read_steps(run / "metrics.jsonl")]
