"""Which parts of an attempt on a cluster the next one reuses, and why it failed; without a cluster."""

from types import SimpleNamespace

import pytest

from launch.backends import ray_launcher
from launch.backends.ray_launcher import RayLauncher
from suite.errors import BusyError, PeerLostError, PlacementError, StallError, WorkerDiedError, WorkerError
from suite.pipeline.planning.placement import Node, place


class FakeActors:
    """Two actors on the nodes that were asked for. What they send and whether they stop is set by a test."""

    sent = ()
    given = True
    stops = True
    made: list

    def __init__(self, nodes, kind, threads):
        self.nodes, self.workers, self.usable, self.ended = nodes, len(nodes), True, False
        self._sent = list(type(self).sent)
        self.made.append(self)

    def has_devices(self):
        return self.given

    def begin(self, attempt):
        pass

    def receive(self):
        return {}, self._sent.pop(0)

    def stop(self):
        return self.stops

    def end(self):
        self.ended = True


@pytest.fixture
def session(monkeypatch, tmp_path):
    """A session on two devices of one node, without a Ray."""
    actors = type("Actors", (FakeActors,), {"made": []})
    monkeypatch.setattr(ray_launcher, "check_shared", lambda *_: None)
    monkeypatch.setattr(ray_launcher, "StageActors", actors)
    monkeypatch.setattr(ray_launcher, "threads_of", lambda experiment: 1)
    monkeypatch.setattr(ray_launcher, "checkpoint_location", lambda run, experiment: "s3://bucket")
    nodes, closed = [Node("1", "a", 2, 2)], []
    connection = SimpleNamespace(
        open=bool, connected=True, nodes=lambda kind: nodes, nodes_and_silent=lambda kind: (nodes, []),
        lost_nodes=lambda ids: ids & {"lost"}, close=lambda: closed.append(True),
    )  # fmt: skip
    attempt = SimpleNamespace(run=None, folder=tmp_path, data=None, workers=2, use_gpu=False)
    experiment = SimpleNamespace(
        pipeline=SimpleNamespace(stages=2, replicas=1), train=SimpleNamespace(device_timeout_s=0.0)
    )
    watchdog = SimpleNamespace(
        coords=range(2), heartbeats={}, verdict=None, should_stop=False, paused=False, receive=lambda heartbeats: None
    )
    made = RayLauncher(connection, attempt, place(nodes, 2, 1), print)
    made.actors, made.nodes, made.closed, made.watchdog = actors, nodes, closed, watchdog
    made.begin = lambda: made._actors_for(attempt, experiment)
    made.start = lambda: made.run(attempt, experiment, watchdog)
    return made


def test_an_attempt_reuses_the_actors_of_the_previous_one(session):
    first = session.begin()
    assert session.available_devices(2) == 2
    assert session.begin() is first
    assert not first.ended


def test_actors_that_did_not_start_in_time_or_for_another_k_are_not_reused(session):
    first = session.begin()
    first.usable = False
    second = session.begin()
    assert second is not first
    assert first.ended
    assert session.available_devices(1) == 1
    assert second.ended


def test_devices_that_another_run_took_first_are_chosen_again(session):
    """Each time another node has the free devices."""

    def has_devices(actors):
        session.nodes[0] = Node(str(len(actors.made) + 1), "a", 2, 2)
        return len(actors.made) == 3

    session.actors.has_devices, session.actors.sent = has_devices, [{0: None}, {1: None}]
    session.start()
    assert [actors.nodes for actors in session.actors.made] == [["1", "1"], ["2", "2"], ["3", "3"]]
    assert all(actors.ended for actors in session.actors.made)
    assert not session.watchdog.paused


def test_devices_that_others_always_take_first_are_a_busy_error(session):
    session.actors.given = False
    with pytest.raises(BusyError, match="others took the devices 10 times before this run"):
        session.start()
    assert len(session.actors.made) == ray_launcher.MOST_LOSSES
    assert all(actors.ended for actors in session.actors.made)


def test_too_few_devices_are_refused_with_those_of_each_node(session):
    session.nodes[0] = Node("1", "a", 1, 1)
    with pytest.raises(PlacementError, match="a: 1 of 1"):
        session.start()


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        ({0: PeerLostError("lost 1"), 1: WorkerDiedError(1, "killed")}, WorkerDiedError),
        ({0: StallError("late"), 1: WorkerDiedError(1, "killed")}, WorkerDiedError),
        ({0: PeerLostError("lost 1")}, PeerLostError),
    ],
)
def test_the_root_cause_comes_before_what_it_caused_and_the_actors_stay(session, ended, kind):
    session.actors.sent = [{}, ended]
    with pytest.raises(kind):
        session.start()
    (actors,) = session.actors.made
    assert (session.closed, actors.ended, session.begin() is actors) == ([], False, True)


def test_an_actor_that_does_not_stop_ends_the_session(session):
    session.actors.sent, session.actors.stops = [{0: WorkerError("x")}], False
    with pytest.raises(WorkerError):
        session.start()
    assert session.closed == [True]
    assert session.begin() is not session.actors.made[0]


def test_a_lost_node_is_the_cause_and_ends_the_session(session):
    session.watchdog.heartbeats = {0: SimpleNamespace(node="1"), 1: SimpleNamespace(node="lost")}
    session.actors.sent = [{0: WorkerDiedError(0, "killed")}]
    with pytest.raises(WorkerDiedError, match="worker 1 gave no result: its node is lost") as raised:
        session.start()
    assert (raised.value.kind, session.closed) == ("node", [True])


def test_what_ray_raises_is_one_sentence(session):
    session.actors.has_devices = lambda _: 1 / 0
    with pytest.raises(WorkerError, match=r"^Ray could not run the workers: ZeroDivisionError: division"):
        session.start()
