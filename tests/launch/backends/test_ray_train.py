"""Which parts of an attempt on a cluster the next one reuses, and why it failed; without a cluster."""

from types import SimpleNamespace

import pytest
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError

from launch.backends import ray_train
from launch.backends.ray_train import RayTrainLauncher, root_cause
from suite.errors import BusyError, PeerLostError, WorkerDiedError, WorkerError
from suite.pipeline.planning.placement import Node, place


class FakeAgents:
    def __init__(self, *_):
        self.alive, self.workers, self.ended = True, 2, False

    def end(self):
        self.ended = True

    def wait(self):
        pass


@pytest.fixture
def session(monkeypatch, tmp_path):
    """A session on two devices of one node, without a Ray."""
    monkeypatch.setattr(ray_train, "check_shared", lambda *_: None)
    monkeypatch.setattr(ray_train, "AgentGroup", FakeAgents)
    monkeypatch.setattr(ray_train, "checkpoint_location", lambda run, experiment: "s3://bucket")
    nodes = [Node("1", "a", 2, 2)]
    connection = SimpleNamespace(
        open=bool,
        connected=False,
        nodes=lambda kind: nodes,
        nodes_and_silent=lambda kind: (nodes, []),
        end_controller=bool,
        close=bool,
    )
    attempt = SimpleNamespace(run=None, folder=tmp_path, data=None, workers=2, use_gpu=False)
    made = RayTrainLauncher(connection, attempt, place(nodes, 2, 1), print)
    experiment = SimpleNamespace(
        pipeline=SimpleNamespace(stages=2, replicas=1), train=SimpleNamespace(device_timeout_s=0.0)
    )

    made.attempt, made.experiment, made.nodes = attempt, experiment, nodes
    made.agents_are = lambda agents: monkeypatch.setattr(ray_train, "AgentGroup", agents)
    made.begin = lambda: made._agents_for(attempt, experiment)
    return made


def test_an_attempt_reuses_the_agents_of_the_previous_one(session):
    first = session.begin()
    assert session.available_devices(2) == 2
    assert session.begin() is first
    assert not first.ended


def test_agents_that_ended_are_not_reused(session):
    agents = session.begin()
    agents.alive = False
    assert session.begin() is not agents
    assert agents.ended


@pytest.mark.parametrize("losses", [2, 99])
def test_devices_that_another_run_took_first_are_chosen_again(session, losses):
    """Each time another node has the free devices."""
    started, watchdog = [], SimpleNamespace(coords=range(2), heartbeats={}, verdict=None)

    def agents(attempt, experiment, node_ids, *_):
        started.append(node_ids)
        made, is_lost = FakeAgents(), len(started) <= losses
        taken = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))
        made.begin = lambda attempt, watchdog: None
        made.reports = lambda: raise_or_return(taken if is_lost else {0: None, 1: None})
        made.alive = not is_lost
        session.nodes[0] = Node(str(len(started) + 1), "a", 2, 2)
        return made

    session.agents_are(agents)
    if losses == 2:
        session.run(session.attempt, session.experiment, watchdog)
        assert started == [["1", "1"], ["2", "2"], ["3", "3"]]
        assert not watchdog.paused
    else:
        with pytest.raises(BusyError, match="others took the devices 10 times before this run"):
            session.run(session.attempt, session.experiment, watchdog)
        assert len(started) == ray_train.MOST_LOSSES


def raise_or_return(answer):
    if isinstance(answer, Exception):
        raise answer
    return answer


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
        (PeerLostError("lost 1"), PeerLostError, "^lost 1$"),
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
