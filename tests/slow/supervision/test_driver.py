"""The driver is killed: its workers end by themselves, and a resume loses nothing beyond the last manifest."""

import json
import time

import psutil
import pytest

from tests.launch.command_line import SMALL_1F1B, gpipe, losses, only_run
from tests.slow.running import EXPERIMENT, Running
from tests.slow.supervision.test_nodes import undisturbed_losses

GONE_S = 30.0
AGENTS_S = 180.0
"""Two agents of a Ray that was started here try for a minute to tell its head of the death, which is dead as well."""
AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")


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
def test_a_killed_driver_leaves_no_process_and_its_run_goes_on(tmp_path, ended, launcher):
    settings = f"{SMALL_1F1B} pipeline.stages=2 tracking.wandb=disabled"
    arguments = ["--launcher", launcher, "--set", f"{settings} train.steps=100000"]
    driver = ended(Running(tmp_path, [*EXPERIMENT, *arguments]))
    driver.until(lambda: list(tmp_path.glob("runs/*/*/checkpoints/00000009/manifest.json")))
    below = psutil.Process(driver.process.pid).children(recursive=True)
    assert len(below) > 2
    held, agents = ports(below), [process for process in below if process.name().startswith(AGENTS)]
    killed_at = time.time()
    driver.end()
    _, alive = psutil.wait_procs([process for process in below if process not in agents], GONE_S)
    assert not alive, [process.cmdline() for process in alive]
    _, alive = psutil.wait_procs(agents, AGENTS_S)
    assert not alive, [process.cmdline() for process in alive]
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
    assert losses(run) == undisturbed_losses(whole, f"{settings} train.steps={steps}")
