"""What a StageActor does with its stage process, which is a function here; without a Ray."""

import os
import time
from types import SimpleNamespace

import pytest
import ray

from launch.backends import stage_actor
from launch.backends.stage_actor import StageActor
from launch.worker import attempt
from launch.worker.attempt import Attempt
from launch.worker.heartbeat import HeartbeatWriter, parse_heartbeat
from launch.worker.save_requests import SaveRequests
from suite.errors import WorkerDiedError
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.action import Action
from suite.training.loop import Ask


@pytest.fixture
def actor(monkeypatch):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["5"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(stage_actor, "own_node", lambda: "node")
    monkeypatch.setattr(stage_actor, "use_interface_of", lambda host: None)
    monkeypatch.setattr(stage_actor, "SEND_S", 0.01)
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return StageActor(1, 3)


@pytest.fixture
def stage_is(monkeypatch):
    return lambda stage: monkeypatch.setattr(stage_actor, "run_worker_alone", stage)


def run(actor, number=1, use_gpu=False, gpus=()):
    return actor.run(Attempt(None, None, 2, use_gpu=use_gpu, number=number), "host 1", gpus)


def test_heartbeats_come_when_they_change_then_the_last_action_and_the_end(actor, stage_is):
    may_end = []

    def stage(rank, store, prefix, attempt, device, node, should_stop, preload):
        status = WorkerStatus()
        with HeartbeatWriter(attempt.heartbeats, RankCoord(1, 2, 1), attempt.number, status, node):
            while not may_end:
                time.sleep(0.001)
            status.begin(Action("B", 99), 17)
            (heartbeats,) = attempt.heartbeats.iterdir()
            kept = heartbeats.read_bytes()
        heartbeats.write_bytes(kept)  # as if it had been killed there
        return WorkerDiedError(rank, f"{store}, {prefix}, {device}, {node}, {os.environ['OMP_NUM_THREADS']}")

    stage_is(stage)
    sent = run(actor, number=7)
    first = parse_heartbeat(next(sent), 7)
    may_end.append(True)
    *between, last, end = sent
    assert (first.stage, first.node) == (1, "node")
    assert parse_heartbeat(last, 7).at == "B99 of step 18"
    assert len(between) <= 1  # whether it had begun the action when it was looked at
    assert str(end) == "worker 1 gave no result: host 1, 7, None, node, 3"


def test_a_stop_ends_its_attempt_even_if_that_begins_later_and_no_later_one(actor, stage_is):
    def stage(*_):
        *_, should_stop, _ = _
        for _ in range(20):
            if should_stop():
                return WorkerDiedError(1, "stopped")
            time.sleep(0.001)
        return None

    stage_is(stage)
    actor.stop(2)
    assert [str(end) for end in run(actor, number=2)] == ["worker 1 gave no result: stopped"]
    assert list(run(actor, number=3)) == [None]


def test_a_stage_sees_all_gpus_of_its_node_and_takes_its_own(actor, stage_is):
    seen = []
    stage_is(lambda *given: seen.extend((given[4], os.environ["CUDA_VISIBLE_DEVICES"])))
    assert list(run(actor, use_gpu=True, gpus=["3", "5"])) == [None]
    assert seen == [1, "3,5"]


def test_without_a_setting_a_stage_computes_with_its_share_of_the_nodes_cores(actor, stage_is, monkeypatch):
    actor._threads, seen = None, []
    stage_is(lambda *_: seen.append(os.environ["OMP_NUM_THREADS"]))
    monkeypatch.setattr(attempt, "cpu_limit", lambda: 32)
    for local in (2, 8, 64):
        assert list(actor.run(Attempt(None, None, 1024, local_workers=local), "host 1", ())) == [None]
    assert seen == ["16", "4", "1"]


def test_a_stage_is_asked_to_end_by_a_file_beside_its_heartbeat(actor, stage_is):
    seen = []

    def stage(rank, store, prefix, own, *_):
        actor.end_early()
        seen.append(SaveRequests(own.heartbeats, None)())

    stage_is(stage)
    actor.end_early()  # before it runs
    assert list(run(actor)) == [None]
    assert seen == [Ask.END]
