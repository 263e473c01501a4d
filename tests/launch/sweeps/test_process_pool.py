"""Members in processes of their own: what each is given, how it is judged, how it is ended. No Ray."""

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
from launch.sweeps.devices import LocalDevicePool
from launch.sweeps.member_process import MemberSpec
from launch.sweeps.pending import PendingMember
from launch.sweeps.process_pool import ProcessPool
from launch.sweeps.retries import MemberError, RetryDecision
from launch.sweeps.tasks import SweepTasks, visible
from suite.errors import PlacementError
from suite.pipeline.planning.devices import GIB
from tests.launch.train.test_end_to_end import environment

MACHINE = Cluster(2, GIB, "gpu")


@pytest.fixture
def members(tmp_path, monkeypatch):
    """Two that cannot be run: files lie where their folders should be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    found = SWEEPS["bilingual"].members("tiny", Cluster(2, GIB, "cpu"), tmp_path / "runs")[-2:]
    for member in found:
        place = tmp_path / "runs" / member.folder
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("in the way")
    return found


def until(seen, seconds=60):
    end = time.monotonic() + seconds
    while not (found := seen()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def started():
    """The members' processes, and the devices each sees."""
    found = {}
    for child in psutil.Process().children():
        try:
            if "launch.sweeps.member_process" in child.cmdline():
                found[child.pid] = child.environ().get("CUDA_VISIBLE_DEVICES")
        except psutil.Error:
            continue
    return found


def test_members_on_gpus_are_side_by_side_and_each_sees_its_own(members, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    work = SweepTasks(
        [PendingMember(one, False, False) for one in members], "spawn", MACHINE, tmp_path / "logs", Console(quiet=True)
    )
    thread = threading.Thread(target=work.run, args=(LocalDevicePool(2), {}), daemon=True)
    thread.start()
    seen = until(lambda: now if len(now := started()) == 2 else None)
    assert sorted(seen.values()) == ["4", "7"]
    assert all(os.getpgid(pid) == pid for pid in seen)  # a Ctrl-C is the sweep's alone
    thread.join(100)
    assert len(work.failures) == 4  # the scores were not begun
    assert all("not started, because" in told for told in work.failures if told.startswith("score"))
    logs = [path.read_text() for path in (tmp_path / "logs").glob("*.log")]
    assert len(logs) == 2
    assert all("error: checkpoints cannot be listed: " in log for log in logs)


def test_a_killed_member_is_worth_another_try_and_an_ended_crew_starts_none(members, tmp_path):
    log = tmp_path / "log"
    spec = MemberSpec(
        "train", members[0].folder, members[0].experiment.to_toml(), "spawn", f"{log}.json", f"{log}.there"
    )
    crew, failures = ProcessPool(), []

    def run():
        try:
            crew.run(spec, log, {})
        except MemberError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    (pid,) = until(started)
    psutil.Process(pid).kill()
    thread.join(30)
    (error,) = failures
    assert error.verdict == RetryDecision.AGAIN
    assert "its process ended by SIGKILL" in str(error)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(started)
    crew.end()
    thread.join(30)
    assert not started()
    run()
    assert str(failures[-1]) == "the sweep is stopping"
    assert failures[-1].verdict == RetryDecision.NO


class LateOrder(MemberSpec):
    """An order that is sent when its process has ended."""

    def as_line(self):
        (process,) = (child for child in psutil.Process().children() if child.name() == "false")
        until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        return super().as_line()


def test_a_member_that_ends_before_it_is_told_its_order_is_worth_another_try(members, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    spec = LateOrder("train", "a/b", members[0].experiment.to_toml(), "spawn", f"{tmp_path}/outcome", f"{tmp_path}/at")
    with pytest.raises(MemberError, match="its process ended with exit code 1 without a report") as raised:
        ProcessPool().run(spec, tmp_path / "log", {})
    assert raised.value.verdict == RetryDecision.AGAIN


def test_an_order_is_a_line(members):
    spec = MemberSpec("score", "a/b", members[0].experiment.to_toml(), "ray", "o", "s", members[0].scoring)
    line = spec.as_line()
    assert line.count("\n") == 1
    assert MemberSpec.of_line(line) == spec
    assert MemberSpec.of_line(replace(spec, scoring=None).as_line()).scoring is None


def test_a_member_that_needs_more_than_the_whole_cluster_is_refused_with_the_numbers(members):
    wide = replace(members[0], experiment=members[0].experiment.with_settings("pipeline.stages=2 pipeline.replicas=3"))
    pending = [PendingMember(wide, False, False), PendingMember(members[1], False, False)]
    check_needs(pending, 6, "there are 6")
    check_needs([replace(pending[0], trained=True)], 1, "there is 1")  # scoring takes one
    with pytest.raises(
        PlacementError, match=r"needs 6 devices \(K = 2 stages x R = 3 replicas\), but there are 5; add nodes"
    ):
        check_needs(pending, 5, "there are 5")


def test_devices_are_named_as_this_process_sees_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible((0, 2)) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert visible((0, 2)) == "GPU-a,GPU-c"
