"""Which parts of an attempt on a cluster the next one reuses, and why it failed; without a cluster."""

import threading
from types import SimpleNamespace

import pytest

from launch.backends import ray_connection, ray_launcher
from launch.backends.ray_launcher import RayLauncher
from suite.errors import (
    BusyError,
    EndedEarlyError,
    PeerLostError,
    PlacementError,
    StallError,
    WorkerDiedError,
    WorkerError,
)
from suite.pipeline.planning.placement import Node, place


class FakeActors:
    """Two actors on the nodes that were asked for. What they send and whether they stop is set by a test."""

    sent = ()
    given = True
    late: set = frozenset()
    hold_s = 1.0
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
        return self.late

    def end(self):
        self.ended = True


@pytest.fixture
def session(monkeypatch, tmp_path):
    """A session on two devices of one node, without a Ray."""
    actors = type("Actors", (FakeActors,), {"made": []})
    monkeypatch.setattr(ray_launcher, "check_shared", lambda *_: None)
    monkeypatch.setattr(ray_launcher, "StageActors", actors)
    monkeypatch.setattr(ray_launcher, "checkpoint_location", lambda run, experiment: "s3://bucket")
    nodes, closed = [Node("1", "a", 2, 2)], []
    connection = SimpleNamespace(
        open=bool,
        connected=True,
        left_out={},
        nodes=lambda kind: nodes,
        nodes_and_silent=lambda kind: (nodes, []),
        lost_nodes=lambda ids: ids & {"lost"},
        close=lambda: closed.append(True),
    )
    attempt = SimpleNamespace(run=None, folder=tmp_path, data=None, workers=2, use_gpu=False)
    experiment = SimpleNamespace(
        pipeline=SimpleNamespace(stages=2, replicas=1), train=SimpleNamespace(device_timeout_s=0.0, threads=None)
    )
    watchdog = SimpleNamespace(
        coords=range(2),
        heartbeats={},
        verdict=None,
        should_stop=False,
        paused=False,
        ends_early=threading.Event(),
        receive=lambda heartbeats: None,
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


@pytest.mark.parametrize(("timeout_s", "found"), [(60.0, 2), (40.0, 1), (0.0, 1)])
def test_lost_devices_are_waited_for_as_long_as_the_run_says(session, timeout_s, found, monkeypatch):
    """A node that replaces the lost one comes after 50 seconds."""
    now = [0.0]

    def sleep(seconds):
        now[0] += 5

    monkeypatch.setattr(ray_connection, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    session._connection.nodes_and_silent = lambda kind: (
        [Node("1", "a", 1, 1), *([Node("2", "b", 1, 1)] if now[0] >= 50 else [])],
        [],
    )
    session._device_timeout_s = timeout_s
    assert session.available_devices(2) == found


@pytest.mark.parametrize(("free", "found"), [(0, 2), (1, 2), (2, 4)])
def test_a_run_on_fewer_devices_keeps_its_actors_until_enough_have_become_free(session, free, found, monkeypatch):
    monkeypatch.setattr(ray_connection, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=None))
    actors = session.begin()
    session.nodes[0] = Node("1", "a", free, 4)
    session._connection.nodes_and_silent = lambda kind: ([Node("1", "a", free + 2, 4)], [])  # once they are released
    assert session.available_devices(4) == found
    assert actors.ended == (found == 4)


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


@pytest.mark.parametrize(("free", "why"), [(1, "others have them now"), (2, "although they are free")])
def test_devices_that_ray_never_gives_are_a_busy_error_that_says_whether_they_are_free(session, free, why):
    def has_devices(actors):
        session.nodes[0] = Node("1", "a", free, 2)
        return False

    place = session._place
    session._place = lambda *sizes: (session.nodes.__setitem__(0, Node("1", "a", 2, 2)), place(*sizes))[1]
    session.actors.has_devices = has_devices
    with pytest.raises(BusyError, match=f"did not give this run its devices 10 times, {why}"):
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


@pytest.mark.parametrize(("node", "ends"), [("1", False), ("lost", True)])
def test_an_actor_that_does_not_stop_ends_the_session_if_its_node_does_not_answer(session, node, ends):
    session.actors.sent, session.actors.late = [{0: WorkerError("x")}], {node}
    with pytest.raises(WorkerError):
        session.start()
    assert session.closed == [True] * ends
    assert (session.begin() is session.actors.made[0]) is not ends


@pytest.mark.parametrize(("others", "left_out"), [(2, "a"), (1, "")])
def test_a_node_is_left_out_if_others_have_enough_free_devices(session, others, left_out):
    first, own = session.begin(), session._connection
    session.nodes.append(Node("2", "b", others, 2))
    own.nodes_and_silent = lambda kind: ([node for node in session.nodes if node.id not in own.left_out], [])
    own.nodes = lambda kind: own.nodes_and_silent(kind)[0]
    assert session.leave_out(0) == left_out
    assert first.ended == bool(left_out)
    assert session.begin().nodes == (["2", "2"] if left_out else ["1", "1"])


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


def test_a_run_that_is_asked_to_end_asks_its_stages_once(session):
    asked = []
    session.actors.end_early = lambda actors: asked.append(True)
    session.watchdog.ends_early.set()
    session.actors.sent = [{}, {}, {0: EndedEarlyError("ended early, saved after step 7")}]
    with pytest.raises(EndedEarlyError):
        session.start()
    assert asked == [True]
