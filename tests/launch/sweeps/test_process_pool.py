"""Members in their own processes: their devices, their outcome, and how they are ended. No Ray."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
from rich.console import Console

from experiments.base.cluster import Cluster
from experiments.sweeps.registry import SWEEPS
from launch.sweeps.command import check_needs
from launch.sweeps.member import MemberSpec
from launch.sweeps.member_process import ProcessPool
from launch.sweeps.pending import PendingMember
from launch.sweeps.retries import MemberError, RetryDecision
from launch.sweeps.tasks import SweepTasks, cuda_visible_devices
from suite.errors import PlacementError
from suite.pipeline.planning.devices import GIB
from tests.launch.command_line import environment

MACHINE = Cluster(2, GIB, "gpu")


@pytest.fixture
def members(tmp_path, monkeypatch):
    """Two members that cannot run: their folders' paths are files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    found = SWEEPS["temperature"].members("tiny", Cluster(2, GIB, "cpu"), tmp_path / "runs")[-2:]
    for member in found:
        place = tmp_path / "runs" / member.folder
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("in the way")
    return found


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def member_processes():
    """The members' processes, and the devices each sees."""
    found = {}
    for child in psutil.Process().children():
        try:
            if "launch.sweeps.member_process" in child.cmdline():
                found[child.pid] = child.environ().get("CUDA_VISIBLE_DEVICES")
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_members_run_concurrently_on_gpus_of_their_own(members, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    work = SweepTasks(
        [PendingMember(member, False, False) for member in members],
        "local",
        MACHINE,
        tmp_path / "logs",
        Console(quiet=True),
    )
    thread = threading.Thread(target=work.run, args=(lambda: (2, 2), {}), daemon=True)
    thread.start()
    seen = wait_for(lambda: now if len(now := member_processes()) == 2 else None)
    assert sorted(seen.values()) == ["4", "7"]
    assert all(os.getpgid(pid) == pid for pid in seen)  # a Ctrl-C is the sweep's alone
    thread.join(100)
    assert len(work.failures) == 4  # two were not scored
    assert all("not started, because" in failure for failure in work.failures if failure.startswith("score"))
    logs = [path.read_text() for path in (tmp_path / "logs").glob("*.log")]
    assert len(logs) == 2
    assert all("error: checkpoints cannot be listed: " in log for log in logs)


def test_a_killed_member_is_retried_and_an_ended_pool_starts_none(members, tmp_path):
    log = tmp_path / "log"
    spec = MemberSpec("train", members[0].folder, members[0].experiment.to_toml(), "local", f"{log}.json")
    pool, failures = ProcessPool(), []

    def run():
        try:
            pool.run(spec, log, {})
        except MemberError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    (pid,) = wait_for(member_processes)
    psutil.Process(pid).kill()
    thread.join(30)
    (error,) = failures
    assert error.verdict == RetryDecision.AGAIN
    assert "its process ended by SIGKILL" in str(error)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_for(member_processes)
    pool.end()
    thread.join(30)
    assert not member_processes()
    run()
    assert str(failures[-1]) == "the sweep is stopping"
    assert failures[-1].verdict == RetryDecision.NO


class LateSpec(MemberSpec):
    """A spec that is sent after its process has ended."""

    def as_line(self):
        (process,) = (child for child in psutil.Process().children() if child.name() == "false")
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)
        return super().as_line()


def test_a_member_that_ends_before_it_gets_its_spec_is_retried(members, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    spec = LateSpec("train", "a/b", members[0].experiment.to_toml(), "local", f"{tmp_path}/outcome")
    with pytest.raises(MemberError, match="its process ended with exit code 1 without a report") as raised:
        ProcessPool().run(spec, tmp_path / "log", {})
    assert raised.value.verdict == RetryDecision.AGAIN


def test_a_spec_is_one_line(members):
    spec = MemberSpec("score", "a/b", members[0].experiment.to_toml(), "ray", "o", members[0].scoring)
    line = spec.as_line()
    assert line.count("\n") == 1
    assert MemberSpec.of_line(line) == spec
    assert MemberSpec.of_line(replace(spec, scoring=None).as_line()).scoring is None


def test_a_member_that_needs_more_devices_than_exist_is_rejected(members):
    wide = replace(members[0], experiment=members[0].experiment.with_settings("pipeline.stages=2 pipeline.replicas=3"))
    pending = [PendingMember(wide, False, False), PendingMember(members[1], False, False)]
    check_needs(pending, 6, "there are 6")
    check_needs([replace(pending[0], trained=True)], 1, "there is 1")  # scoring takes one
    with pytest.raises(
        PlacementError, match=r"needs 6 devices \(K = 2 stages x R = 3 replicas\), but there are 5; add nodes"
    ):
        check_needs(pending, 5, "there are 5")


def test_devices_have_the_names_of_this_process(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cuda_visible_devices((0, 2)) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert cuda_visible_devices((0, 2)) == "GPU-a,GPU-c"
