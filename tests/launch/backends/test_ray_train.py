"""Which parts of an attempt on a cluster the next one reuses."""

import os
import time
from types import SimpleNamespace

import pytest
import ray

from launch.backends import ray_train
from launch.backends.ray_train import RayTrainBackend
from launch.storage_sync import data_transfer
from launch.storage_sync.data_transfer import FolderReceiver
from suite.errors import WorkerError
from suite.pipeline.planning.placement import Node, place


class Part:
    """A mirror, or the agents."""

    def __init__(self, *given):
        self.complete = self.alive = True
        self.workers, self.ended = 2, False

    def __enter__(self):
        return self

    def end(self, skip_last_copy=False):
        self.ended = True


@pytest.fixture
def session(monkeypatch):
    """A session on two devices of one node, without a Ray."""
    monkeypatch.setattr(ray_train, "FolderMirror", Part)
    monkeypatch.setattr(ray_train, "Agents", Part)
    monkeypatch.setattr(ray_train, "checkpoint_location", lambda run, experiment: "s3://bucket")
    nodes = [Node("1", "a", 2, 2)]
    connection = SimpleNamespace(nodes=lambda kind: nodes, nodes_and_silent=lambda kind: (nodes, []))
    made = RayTrainBackend(connection, False, place(nodes, 2, 1), print)
    job = SimpleNamespace(run=None, folder=None, data=None)
    experiment = SimpleNamespace(pipeline=SimpleNamespace(stages=2, replicas=1))

    def begin():
        return made._agents_for(job, experiment), made._mirror

    made.begin = begin
    return made


def test_an_attempt_reuses_the_agents_and_the_mirror_of_the_previous_one(session):
    first = session.begin()
    assert session.available_devices(2) == 2
    assert session.begin() == first
    assert not any(part.ended for part in first)


def test_an_attempt_replaces_agents_and_mirror_after_a_node_was_lost(session):
    agents, mirror = session.begin()
    mirror.complete = False
    assert session.available_devices(2) == 2
    assert (agents.ended, mirror.ended) == (True, True)
    again = session.begin()
    assert again[0] is not agents
    assert again[1] is not mirror


def test_agents_that_ended_are_not_reused(session):
    agents, _ = session.begin()
    agents.alive = False
    assert session.begin()[0] is not agents


def test_a_receiver_that_does_not_start_is_reported(tmp_path, monkeypatch):
    def get(call, timeout):
        raise ray.exceptions.GetTimeoutError("late")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(data_transfer, "START_S", 7.0)

    class Receiver:
        has_folder = SimpleNamespace(remote=object)

    with pytest.raises(WorkerError, match=r"node a could not receive .*: its Ray process did not start within 7 s;"):
        data_transfer.send_folder(tmp_path, {Receiver(): Node("1", "a", 1, 1)})


def test_a_receiver_removes_drafts_of_its_folder_that_a_killed_driver_left(tmp_path):
    folder = tmp_path / "text-1[a]"
    for name in ("text-1[a].draft-old", "text-1[a].draft-new", "text-1a.draft-old"):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / "x").write_text("x")
    now = time.time()
    for name in ("text-1[a].draft-old", "text-1a.draft-old"):
        for path in (tmp_path / name, *(tmp_path / name).rglob("*")):
            os.utime(path, (now - 90000, now - 90000))
    FolderReceiver(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text-1[a].draft-new", "text-1a.draft-old"]
