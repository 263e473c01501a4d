"""Which parts of an attempt on a cluster the next one reuses, and why it failed; without a cluster."""

import os
import time
from types import SimpleNamespace

import pytest
import ray

from launch.backends import ray_train
from launch.backends.ray_train import RayTrainLauncher, root_cause
from launch.storage_sync import data_transfer
from launch.storage_sync.data_transfer import FolderReceiver
from suite.errors import NeighbourLostError, WorkerDiedError, WorkerError
from suite.pipeline.planning.placement import Node, place


class Part:
    """A mirror, or the agents."""

    def __init__(self, *given):
        self.complete = self.alive = True
        self.workers, self.ended = 2, False

    def start(self):
        pass

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
    made = RayTrainLauncher(connection, False, place(nodes, 2, 1), print)
    attempt = SimpleNamespace(run=None, folder=None, data=None, workers=2)
    experiment = SimpleNamespace(pipeline=SimpleNamespace(stages=2, replicas=1))

    def begin():
        return made._agents_for(attempt, experiment), made._mirror

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
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: ([], calls))
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


class WorkerGroupError(Exception):
    """Like Ray Train's: has the failures by rank."""

    def __init__(self, failures):
        super().__init__("many lines of Ray's own")
        self.worker_failures = failures


class ActorDiedError(Exception):
    """Like the one that Ray raises for a killed process."""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (NeighbourLostError("lost 1"), NeighbourLostError, "^lost 1$"),
        (WorkerGroupError({1: ActorDiedError("a\nb")}), WorkerDiedError, "worker 1 .* its process ended"),
        (WorkerGroupError({2: ActorDiedError("a"), 1: KeyError("x\ny")}), WorkerDiedError, "worker 1 .* KeyError: "),
        (WorkerGroupError({}), WorkerError, "many lines of Ray's own"),
    ],
)
def test_the_root_cause_is_one_sentence(error, kind, message):
    cause = root_cause(error)
    assert type(cause) is kind
    with pytest.raises(kind, match=message):
        raise cause
    assert "\n" not in str(cause)


def test_a_preempted_node_is_distinguished_from_a_death():
    death = ActorDiedError("gone")
    death.preempted = True
    cause = root_cause(WorkerGroupError({1: death}))
    assert (type(cause), cause.rank, cause.kind) == (WorkerDiedError, 1, "preemption")
