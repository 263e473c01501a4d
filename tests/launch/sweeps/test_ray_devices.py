"""Devices of a Ray cluster that members of a sweep may use, from what Ray counts as free."""

import os
from types import SimpleNamespace

import pytest

from launch.runs.store import RunFolder
from launch.sweeps import ray_devices
from launch.sweeps.ray_devices import RayDevices
from launch.sweeps.tasks import Task
from suite.pipeline.planning.placement import Node


@pytest.fixture
def devices(monkeypatch):
    """Four devices, of which another user holds one."""
    monkeypatch.setattr(ray_devices, "MemberProcess", lambda task, launcher, variables: None)
    nodes = [Node("1", "a", 3, 4)]
    made = RayDevices(
        SimpleNamespace(kind=lambda: "CPU", nodes=lambda kind: nodes, name=lambda: "head:6379", connected=True)
    )
    made.counts = lambda free: nodes.__setitem__(0, Node("1", "a", free, 4))
    return made


def test_devices_are_kept_for_a_member_until_its_workers_hold_them(devices, tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    monkeypatch.setattr(Task, "run", property(lambda task: run))
    first = Task("train", SimpleNamespace(folder="first"), 2, tmp_path / "log")
    assert devices.free([]) == 3
    run.heartbeats.touch()  # of an earlier attempt
    devices.start(first, [])
    assert devices.free([first]) == 1
    os.utime(run.heartbeats, (1, 1))
    devices.counts(1)  # its workers have two, the other user one
    assert devices.free([first]) == 1
    devices.counts(2)  # the other user has ended
    assert devices.free([first]) == 2
