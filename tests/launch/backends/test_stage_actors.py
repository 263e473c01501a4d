"""The driver's side of StageActors: what it takes from their streams, and which actors it starts again."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from launch.backends import stage_actors
from launch.backends.stage_actors import StageActors
from launch.worker.attempt import Attempt
from suite.errors import PeerLostError, WorkerDiedError, WorkerError


class FakeActor:
    """An actor whose calls answer at once; ``run`` sends what the test puts into ``sends``."""

    def __init__(self, rank, threads, log):
        self.rank, self.sends, self.log = rank, [], log
        log.append(f"start {rank}")

    def __getattr__(self, method):
        def remote(*given):
            self.log.append(f"{method} {self.rank}")
            if method == "run":
                self.given = given
            device = f"node {self.rank // 2}", [str(self.rank)]
            return {"device": device, "open_store": "host 1", "run": self}.get(method)

        call = SimpleNamespace(remote=remote)
        call.options = lambda **_: call
        return call

    def __next__(self):
        return self.sends.pop(0)


@pytest.fixture
def actors(monkeypatch):
    """Three actors on two nodes. ``made`` has them by rank, ``log`` what happened to them; ``group.dies`` are the ranks
    that die before they start."""
    log, made = [], {}

    def get(answer, timeout=None):
        if timeout is not None and isinstance(answer, tuple) and int(answer[1][0]) in group.dies:
            raise ActorDiedError
        if isinstance(answer, ray.exceptions.RayError):
            raise answer
        return answer

    def start(rank, threads):
        made[rank] = FakeActor(rank, threads, log)
        return made[rank]

    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))
    monkeypatch.setattr(ray, "remote", lambda **_: lambda actor: remote)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda actor: log.append(f"kill {actor.rank}"))
    monkeypatch.setattr(ray, "wait", lambda waits, **_: ([actor for actor in waits if actor.sends], []))
    monkeypatch.setattr(stage_actors, "placement_group", lambda *given, **_: given)
    monkeypatch.setattr(stage_actors, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    group = StageActors(["a", "a", "b"], "GPU", 1)
    group.made, group.log, group.dies = made, log, set()
    return group


def attempt(number):
    return Attempt(None, None, 3, use_gpu=True, number=number)


def test_heartbeats_and_ends_come_by_rank_all_that_are_there_at_once(actors):
    actors.begin(attempt(1))
    assert actors.receive() == ({}, {})
    lost = PeerLostError("lost")
    actors.made[0].sends, actors.made[2].sends = [b"old", b"new"], [b"last", lost]
    assert actors.receive() == ({0: b"new", 2: b"last"}, {2: lost})
    actors.made[1].sends = [None]
    assert actors.receive() == ({}, {1: None})


def test_each_stage_sees_the_gpus_of_the_runs_stages_on_its_node_and_all_have_the_share_of_the_fullest_node(actors):
    actors.begin(attempt(1))
    given = [actors.made[rank].given for rank in range(3)]
    assert [gpus for _, _, gpus in given] == [["0", "1"], ["0", "1"], ["2"]]
    assert [own.local_workers for own, _, _ in given] == [2, 2, 2]


@pytest.mark.parametrize(
    ("error", "kind", "how"),
    [
        (ActorDiedError(), "death", r"its Ray actor ended \(killed, or out of memory\)"),
        (RayActorError(None, "gone", False, True), "preemption", "its node was preempted"),
        (RayActorError(None, "died in\nValueError: x\n", True), "death", "its Ray actor could not start: ValueError"),
        (RayTaskError("run", "trace", KeyError("x")), "death", "KeyError: 'x'"),
    ],
)
def test_an_actor_that_died_fails_its_stage_and_alone_starts_again_in_the_next_attempt(actors, error, kind, how):
    actors.begin(attempt(1))
    actors.made[1].sends = [error]
    _, ended = actors.receive()
    assert actors.log[-1] == "kill 1"
    assert (type(ended[1]), ended[1].rank, ended[1].kind) == (WorkerDiedError, 1, kind)
    with pytest.raises(WorkerDiedError, match=f"worker 1 gave no result: {how}"):
        raise ended[1]
    for rank in (0, 2):
        actors.made[rank].sends = [WorkerError("stopped")]
    actors.log.clear()
    assert actors.stop() == set()
    assert actors.log == ["stop 0", "stop 2"]
    actors.begin(attempt(2))
    assert [line for line in actors.log if "start" in line] == ["start 1"]
    assert sum(line.startswith("run") for line in actors.log) == 3
    assert actors.usable


@pytest.mark.parametrize("rank", [0, 2])
def test_an_actor_that_is_killed_while_it_starts_is_named_and_started_again(actors, rank):
    actors.dies = {rank}
    with pytest.raises(WorkerDiedError, match=f"worker {rank} gave no result: its Ray actor ended"):
        actors.begin(attempt(1))
    assert actors.stop() == set()
    assert actors.usable
    actors.dies.clear()
    actors.begin(attempt(2))
    assert [line for line in actors.log if "start" in line] == ["start 0", "start 1", "start 2", f"start {rank}"]
    assert [actors.made[rank].given[2] for rank in range(3)] == [["0", "1"], ["0", "1"], ["2"]]


def test_actors_that_do_not_start_in_time_are_not_used_again(actors, monkeypatch):
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: (_ for _ in ()).throw(GetTimeoutError()))
    with pytest.raises(
        WorkerDiedError, match="worker 0 gave no result: its Ray actor did not start in 180 s"
    ) as raised:
        actors.begin(attempt(2))
    assert (raised.value.kind, actors.usable) == ("start", False)


@pytest.mark.parametrize(("ends_s", "late"), [((1, 12, 25), []), ((1, 12, 30), [2])], ids=["a long tail", "one hangs"])
def test_ends_are_waited_for_while_others_come_and_only_late_actors_start_again(actors, monkeypatch, ends_s, late):
    now = [0.0]

    def receive():
        now[0] += 1.0
        for rank, end_s in enumerate(ends_s):
            if end_s == now[0]:
                actors._streams = {stream: at for stream, at in actors._streams.items() if at != rank}

    monkeypatch.setattr(stage_actors.time, "monotonic", lambda: now[0])
    actors.begin(attempt(1))
    monkeypatch.setattr(actors, "receive", receive)
    assert actors.stop() == {f"node {rank // 2}" for rank in late}
    assert [line for line in actors.log if "kill" in line] == [f"kill {rank}" for rank in late]
    actors.log.clear()
    actors.begin(attempt(2))
    assert [line for line in actors.log if "start" in line] == [f"start {rank}" for rank in late]
