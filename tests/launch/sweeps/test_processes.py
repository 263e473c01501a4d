"""Members in their own processes: their devices, and how they are ended. No Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from experiments.base.cluster import Cluster
from experiments.sweeps.registry import SWEEPS
from launch.sweeps.command import check_needs
from launch.sweeps.devices import Devices, MemberProcess, cuda_visible_devices
from launch.sweeps.runner import Runner
from launch.sweeps.tasks import Task, in_order, tasks_of
from suite.errors import PlacementError
from tests.launch.command_line import environment

LAPTOP = Cluster(2, 2**30, "cpu")


@pytest.fixture
def members(tmp_path, monkeypatch):
    """Two members that cannot run: their folders' paths are files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    found = SWEEPS["temperature"].members("tiny", LAPTOP, tmp_path / "runs")[-2:]
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
            if "launch.cli" in child.cmdline():
                found[child.pid] = child.environ().get("CUDA_VISIBLE_DEVICES")
        except psutil.Error:
            continue
    return found


class Unprepared(Task):
    """A task whose process finds no run, and says so."""

    def prepare(self):
        pass


def unprepared(members, folder):
    return [Unprepared(**vars(each)) for each in tasks(members, folder) if each.what == "train"]


def tasks(members, folder, total=2):
    return in_order([task for member in members for task in tasks_of(member, folder)], total)


@pytest.mark.slow
def test_members_run_concurrently_on_gpus_of_their_own_and_their_errors_are_named(members, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    runner = Runner(unprepared(members, tmp_path), Devices(2, gpus=True), Console(quiet=True))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    seen = wait_for(lambda: now if len(now := member_processes()) == 2 else None)
    assert sorted(seen.values()) == ["4", "7"]
    assert all(os.getpgid(pid) == pid for pid in seen)  # a Ctrl-C is the sweep's alone
    thread.join(200)
    assert len(runner.failures) == 2
    assert all(f"no run '{tmp_path}/runs/temperature-tiny/" in failure for failure in runner.failures)
    assert len(list(tmp_path.glob("*.log"))) == 2


def sweep_of_one_member(folder):
    """A sweep's process: starts one member, and goes on."""
    os.chdir(folder)
    sys.executable = str(folder / "member")
    task = SimpleNamespace(log=Path("log"), arguments=lambda launcher: [])
    Path("pid").write_text(str(MemberProcess(task, "local", {})._process.pid))
    time.sleep(60)


def test_a_member_is_interrupted_when_its_sweep_is_killed(tmp_path):
    """Its one member is a shell's sleep."""
    member = tmp_path / "member"
    member.write_text("#!/bin/sh\ntrap 'echo interrupted; exit 130' TERM\necho ready\nwhile :; do sleep 0.05; done\n")
    member.chmod(0o755)
    sweep = multiprocessing.get_context("fork").Process(target=sweep_of_one_member, args=(tmp_path,))
    sweep.start()
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    pid = int(wait_for((tmp_path / "pid").read_text))
    sweep.kill()
    sweep.join()
    wait_for(lambda: "interrupted" in log.read_text())
    wait_for(lambda: not psutil.pid_exists(pid))


MEMBER = """#!{}
import pathlib, signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in what it starts in the background
worker = subprocess.Popen(["sleep", "60"])
pathlib.Path("worker").write_text(str(worker.pid))
worker.wait()
"""


def test_ending_a_member_ends_its_workers_too(tmp_path, monkeypatch):
    member = tmp_path / "member"
    member.write_text(MEMBER.format(sys.executable))
    member.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(member))
    (first, *_) = SWEEPS["temperature"].members("tiny", LAPTOP, tmp_path)
    process = MemberProcess(tasks([first], tmp_path)[0], "local", {})
    worker = wait_for(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text().strip())
    process.end()
    assert wait_for(process.poll) == -signal.SIGINT
    process.kill()
    wait_for(lambda: not psutil.pid_exists(int(worker)) or psutil.Process(int(worker)).status() == "zombie")
    process.kill()  # there is nothing left


def test_a_member_imports_nothing_from_the_folder_of_the_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/__init__.py").touch()
    (tmp_path / "launch/cli.py").write_text("raise SystemExit(7)")
    process = MemberProcess(SimpleNamespace(log=tmp_path / "log", arguments=lambda launcher: ["--help"]), "local", {})
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 0


def test_members_are_commands_that_a_person_can_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    member = SWEEPS["low_resource"].members("tiny", LAPTOP, tmp_path / "runs")[5]
    train, score = tasks([member], tmp_path)
    run = str(tmp_path / "runs" / member.folder)
    assert train.arguments("local") == ["resume", "--launcher", "local", "--", run]
    assert train.arguments("ray")[:4] == ["resume", "--launcher", "ray", "--set"]
    settings = "score.beam=1 score.max_pairs=3 score.languages=nl score.stages=1"
    assert score.arguments("ray") == ["score", "--set", settings, "--checkpoint", "6", "--", run]
    assert score.after == train.name
    train.prepare()
    text = (Path(run) / "experiment.toml").read_text()
    assert text == member.experiment.to_toml()
    (Path(run) / "record.json").write_text('{"steps": 6, "best_step": 4}')
    assert score.arguments("local")[4] == "4"
    other = replace(member, experiment=member.experiment.with_settings("train.threads=2"))
    replace(train, member=other).prepare()  # it is there: it stays
    assert (Path(run) / "experiment.toml").read_text() == text


def test_tasks_are_ordered_by_priority_and_need_and_fine_tuning_follows_pretraining(tmp_path):
    members = SWEEPS["transfer"].members("", LAPTOP, tmp_path / "runs")
    found = tasks(members, tmp_path, total=8)
    assert [task.what for task in found] == ["train"] * 21
    assert found[0].name == "train transfer/fashion"
    pretrained = [task for task in found if "-pretrained-" in task.name]
    assert len(pretrained) == 10
    assert {task.after for task in pretrained} == {found[0].name}
    assert {task.after for task in found if task not in pretrained} == {None}
    tuning = tasks(SWEEPS["low_resource"].members("tiny", LAPTOP, tmp_path / "runs"), tmp_path)
    assert ["alone" in task.name for task in tuning] == [True] * 10 + [False] * (len(tuning) - 10)
    wide = replace(members[1], experiment=members[1].experiment.with_settings("pipeline.stages=4"))
    assert [task.devices for task in tasks([*members[1:3], wide], tmp_path)] == [2, 2, 2]  # of 2 cores
    assert tasks([*members[1:3], wide], tmp_path, total=8)[0].member is wide


def test_a_member_that_needs_more_devices_than_exist_is_rejected(members, tmp_path):
    wide = replace(members[0], experiment=members[0].experiment.with_settings("pipeline.stages=2 pipeline.replicas=3"))
    found = [*tasks_of(wide, tmp_path), *tasks_of(members[1], tmp_path)]
    check_needs(found, 6, "there are 6")
    check_needs(found[1:2], 1, "there is 1")  # scoring takes one
    with pytest.raises(
        PlacementError, match=r"needs 6 devices \(K = 2 stages x R = 3 replicas\), but there are 5; add nodes"
    ):
        check_needs(found, 5, "there are 5")


def test_devices_have_the_names_of_this_process(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cuda_visible_devices((0, 2)) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert cuda_visible_devices((0, 2)) == "GPU-a,GPU-c"
