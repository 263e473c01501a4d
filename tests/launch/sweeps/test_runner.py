"""The runner of a sweep's tasks: device limits, order, what a failure affects, and what is printed."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from launch.runs.store import RunFolder
from launch.sweeps import runner
from launch.sweeps.runner import MAX_TRIES, Runner
from launch.sweeps.tasks import Task


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(runner, "POLL_S", 0.0)


class Work:
    """A task that runs for some polls and ends with an exit code."""

    def __init__(self, polls, code):
        self.polls, self.code, self.asked, self.killed = polls, code, False, False

    def poll(self):
        self.polls -= 1
        return self.code if self.polls < 0 else None

    def end(self):
        self.asked, self.polls = True, 0

    def kill(self):
        self.killed = True


class Devices:
    """So many devices, of which others hold some, poll by poll; ``codes`` are the exit codes of a task's tries."""

    def __init__(self, total, codes=None, held=(), polls=1):
        self.total, self.codes, self.held, self.polls = total, dict(codes or {}), list(held), polls
        self.order, self.most, self.works = [], 0, {}

    def free(self, running):
        return self.total - (self.held.pop(0) if self.held else 0) - sum(task.devices for task in running)

    def start(self, task, running):
        name = task.member.folder
        self.order.append(name)
        self.most = max(self.most, task.devices + sum(other.devices for other in running))
        code = self.codes[name].pop(0) if self.codes.get(name) else 0
        if isinstance(code, OSError):
            raise code
        self.works[name] = Work(self.polls, code)
        return self.works[name]


FOLDER = Path(tempfile.gettempdir())


class Prepared(Task):
    """A task of a run that is there, beside its log."""

    @property
    def run(self):
        return RunFolder(self.log.with_suffix(""))

    def prepare(self):
        pass


def task(name, devices=1, after=None, folder=FOLDER):
    """Returns the training of a member whose folder is there already."""
    member = SimpleNamespace(folder=name, experiment=SimpleNamespace(train=SimpleNamespace(steps=10)))
    found = Prepared("train", member, devices, folder / f"{name}.log", after and f"train {after}")
    if folder != FOLDER:
        found.run.path.mkdir()
        found.log.write_text("")
    return found


def run(tasks, devices):
    """Runs tasks; returns the sentences about failures, and what is printed."""
    console = Console(file=io.StringIO(), soft_wrap=True)
    made = Runner(tasks, devices, console)
    made.run()
    return made.failures, console.file.getvalue()


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), max_size=10), st.integers(4, 6), st.integers(0, 3), st.lists(st.integers(0, 4)))
def test_every_task_runs_once_within_the_devices_that_others_leave(needs, total, polls, held):
    devices = Devices(total, held=held, polls=polls)
    failures, _ = run([task(str(at), need) for at, need in enumerate(needs)], devices)
    assert not failures
    assert sorted(devices.order) == sorted(map(str, range(len(needs))))
    assert devices.most <= total


def test_tasks_start_in_order_as_many_as_fit_and_smaller_ones_pass_one_that_waits():
    devices = Devices(4, polls=3)
    run([task("a", 2), task("wide", 4), task("b", 1), task("c", 1), task("d", 2)], devices)
    assert devices.order == ["a", "b", "c", "wide", "d"]
    assert devices.most == 4


def test_a_task_waits_for_the_one_before_it_and_for_none_that_is_not_in_the_list():
    devices = Devices(4)
    run([task("tuned", after="pretraining"), task("pretraining"), task("alone", after="done before")], devices)
    assert devices.order == ["pretraining", "alone", "tuned"]


def test_a_failed_task_is_tried_once_more_and_then_named_and_only_those_after_it_are_not_started(tmp_path):
    devices = Devices(1, {"recovers": [-9], "fails": [2, 2], "vanishes": [-11, -9]})
    tasks = [task("recovers", folder=tmp_path), task("fails", folder=tmp_path), task("vanishes", folder=tmp_path),
             task("b", after="fails"), task("c", after="b"), task("d")]  # fmt: skip
    tasks[1].log.write_text("error: of before\nstep 1\nerror: the data is damaged\n")
    failures, printed = run(tasks, devices)
    assert MAX_TRIES == 2
    assert devices.order == ["recovers", "recovers", "fails", "fails", "vanishes", "vanishes", "d"]
    log = tasks[2].log
    assert sorted(failures) == [
        "train b failed: not started, because train fails failed",
        "train c failed: not started, because train b failed",
        "train fails failed: the data is damaged",
        f"train vanishes failed: its process ended by SIGKILL; its log is {log}",
    ]
    assert f"train vanishes: failed: its process ended by SIGSEGV; its log is {log}; it is tried once more" in printed
    assert "train recovers: done" in printed
    assert devices.works["fails"].killed  # its workers may have survived it


def test_a_task_that_cannot_be_started_is_tried_once_more_and_named():
    devices = Devices(1, {"a": [OSError(17, "File exists", "runs/a"), OSError(17, "File exists", "runs/a")]})
    failures, _ = run([task("a")], devices)
    assert devices.order == ["a", "a"]
    assert failures == ["train a failed: runs/a: File exists"]


def test_a_task_waits_without_a_limit_for_devices_that_others_hold_and_the_numbers_are_shown(monkeypatch):
    monkeypatch.setattr(runner, "INTERVAL_S", -1.0)
    devices = Devices(4, held=[3] * 500)
    failures, printed = run([task("large", 4), task("small")], devices)
    assert not failures
    assert devices.order == ["small", "large"]
    assert "1 of 2 done; 1 of 4 devices are free; train large needs 4" in printed


def test_the_steps_of_running_tasks_are_shown_every_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "INTERVAL_S", -1.0)
    one = task("a", folder=tmp_path)

    class Writing(Devices):
        def start(self, task, running):
            lines = {"step": 3, "train/loss": 1.5}, {"step": 3, "valid/nll": 2.0}
            with task.run.metrics.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            return super().start(task, running)

    one.run.metrics.write_text('{"step": 9, "train/loss": 9.0}\n')  # of an earlier attempt
    _, printed = run([one], Writing(1, polls=2))
    assert "0 of 1 done; train a step 3/10 loss 1.500" in printed


def test_an_interrupt_ends_the_running_tasks():
    class Interrupted(Devices):
        def free(self, running):
            if running:
                raise KeyboardInterrupt
            return super().free(running)

    devices = Interrupted(1, polls=10**9)
    with pytest.raises(KeyboardInterrupt):
        run([task("a"), task("b")], devices)
    assert devices.order == ["a"]
    assert devices.works["a"].asked
    assert devices.works["a"].killed
