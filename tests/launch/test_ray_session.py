"""Which parts of an attempt on a cluster serve the next one."""

import os
import time
from types import SimpleNamespace

import pytest
import ray

from launch.cluster import data_transfer, ray_train
from launch.cluster.data_transfer import FolderReceiver
from launch.cluster.ray_train import RaySession
from suite.errors import WorkerError
from suite.pipeline.placement import Node, place


class Part:
    """A mirror, or the agents."""

    def __init__(self, *given):
        self.whole = self.alive = True
        self.workers, self.ended = 2, False

    def __enter__(self):
        return self

    def end(self, at_once=False):
        self.ended = True


@pytest.fixture
def session(monkeypatch):
    """A session on two devices of one node, without a Ray."""
    monkeypatch.setattr(ray_train, "Mirror", Part)
    monkeypatch.setattr(ray_train, "Agents", Part)
    monkeypatch.setattr(ray_train, "place_of", lambda run, experiment: "s3://bucket")
    nodes = [Node("1", "a", 2, 2)]
    connection = SimpleNamespace(nodes=lambda kind: nodes, nodes_and_silent=lambda kind: (nodes, []))
    made = RaySession(connection, False, place(nodes, 2, 1), print)
    job = SimpleNamespace(run=None, folder=None, data=None)
    experiment = SimpleNamespace(pipeline=SimpleNamespace(stages=2, replicas=1))

    def begin():
        return made._agents_for(job, experiment), made._mirror

    made.begin = begin
    return made


def test_an_attempt_takes_the_agents_and_the_mirror_of_the_one_before(session):
    first = session.begin()
    assert session.room(2) == 2
    assert session.begin() == first
    assert not any(part.ended for part in first)


def test_after_a_mirror_that_lost_a_nodes_files_an_attempt_begins_with_new_ones(session):
    agents, mirror = session.begin()
    mirror.whole = False
    assert session.room(2) == 2
    assert (agents.ended, mirror.ended) == (True, True)
    again = session.begin()
    assert again[0] is not agents
    assert again[1] is not mirror


def test_agents_that_ended_serve_no_further_attempt(session):
    agents, _ = session.begin()
    agents.alive = False
    assert session.begin()[0] is not agents


def test_a_receiver_that_does_not_start_is_told_as_that(tmp_path, monkeypatch):
    def get(call, timeout):
        raise ray.exceptions.GetTimeoutError("late")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(data_transfer, "START_S", 7.0)

    class Receiver:
        has_folder = SimpleNamespace(remote=object)

    with pytest.raises(WorkerError, match=r"node a could not take .*: its process of Ray did not start in 7 s;"):
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
