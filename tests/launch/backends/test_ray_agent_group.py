"""How heartbeats come from the agents to the driver, with plain calls in place of Ray's."""

import asyncio
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import ray

from experiments.registry import find
from launch.backends import ray_agent_group
from launch.backends.ray_agent import Sender
from launch.backends.ray_agent_group import AgentGroup
from launch.backends.ray_dispatcher import Dispatcher
from launch.supervision.watchdog import Watchdog
from launch.worker.attempt import Attempt
from launch.worker.heartbeat import HeartbeatWriter, read_heartbeats
from launch.worker.run_plan import RunPlan
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import ScheduleConfig


class Calls:
    """A handle of a dispatcher: a call is answered at once, and counted."""

    def __init__(self):
        self.actor, self.count = Dispatcher(), 0

    def __getattr__(self, method):
        return SimpleNamespace(remote=partial(self.call, method))

    def call(self, method, *arguments):
        self.count += 1
        return asyncio.run(getattr(self.actor, method)(*arguments))


@pytest.fixture
def calls(monkeypatch):
    made = Calls()
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    monkeypatch.setattr(ray, "wait", lambda answers, num_returns=1, timeout=None: (answers, []))
    monkeypatch.setattr(ray_agent_group, "start_on", lambda *_, **__: made)
    monkeypatch.setattr(ray_agent_group, "own_node", str)
    monkeypatch.setattr(ray_agent_group, "POLL_S", 0.0)
    monkeypatch.setattr(ray_agent_group, "_trainer", lambda *_: SimpleNamespace(fit=lambda: threading.Event().wait(60)))
    return made


@pytest.fixture
def experiment():
    return find("t24_1_3b_wide").with_settings("pipeline.stages=2 pipeline.replicas=1")


PLAN = RunPlan((1, 1), ScheduleConfig())


def attempt(folder, number):
    return Attempt(folder, folder, 2, number=number)


def sender(calls, folder, rank, number):
    own = folder / f"node-{rank}-{number}"
    own.mkdir()
    return Sender(calls, rank, attempt(folder, number), own)


def test_heartbeats_reach_the_watchdog_and_the_runs_folder_and_none_of_an_earlier_attempt(calls, experiment, tmp_path):
    agents = AgentGroup(attempt(tmp_path, 1), experiment, ["a", "b"])
    with Watchdog(attempt(tmp_path, 1), experiment, PLAN) as watchdog:
        agents.begin(attempt(tmp_path, 1), watchdog)
        late, status = sender(calls, tmp_path, 1, 1), WorkerStatus()
        with HeartbeatWriter(late.heartbeats, RankCoord(1, 2, 1), 1, status):
            late.send()
            agents.reports()
            watchdog.read_heartbeats()
            assert watchdog.heartbeats[1].attempt == 1
    assert [heartbeat.stage for heartbeat in read_heartbeats(tmp_path / "heartbeats.json", 1)] == [1]
    with Watchdog(attempt(tmp_path, 2), experiment, PLAN) as watchdog:
        agents.begin(attempt(tmp_path, 2), watchdog)
        late.send(last=True)  # the first attempt's agent ends after the second has begun
        agents.reports()
        watchdog.read_heartbeats()
        assert not watchdog.heartbeats
        now = sender(calls, tmp_path, 1, 2)
        with HeartbeatWriter(now.heartbeats, RankCoord(1, 2, 1), 2, WorkerStatus()):
            now.send()
            late.send(last=True)
            agents.reports()
            watchdog.read_heartbeats()
        assert watchdog.heartbeats[1].attempt == 2


def test_the_last_action_of_a_killed_worker_is_sent_at_its_end(calls, experiment, tmp_path):
    agents, status = AgentGroup(attempt(tmp_path, 1), experiment, ["a", "b"]), WorkerStatus()
    with Watchdog(attempt(tmp_path, 1), experiment, PLAN) as watchdog:
        agents.begin(attempt(tmp_path, 1), watchdog)
        sending = sender(calls, tmp_path, 0, 1)
        writer = HeartbeatWriter(sending.heartbeats, RankCoord(0, 2, 1), 1, status)
        with writer:
            sending.send()
            before = calls.count
            for micro_batch in range(100):
                status.begin(Action("B", micro_batch), 17)
                sending.send()  # too early: they are sent twice a second
            assert calls.count == before
            sending.send(last=True)
            agents.reports()
            watchdog.read_heartbeats()
            assert watchdog.heartbeats[0].at == "B99 of step 18"


def test_no_worker_is_blamed_while_the_dispatcher_does_not_answer(calls, experiment, tmp_path, monkeypatch):
    agents, paused = AgentGroup(attempt(tmp_path, 1), experiment, ["a", "b"]), []
    with Watchdog(attempt(tmp_path, 1), experiment, PLAN) as watchdog:
        agents.begin(attempt(tmp_path, 1), watchdog)

        def answer(reply, timeout=None):
            paused.append(watchdog.paused)
            return reply

        monkeypatch.setattr(ray, "get", answer)
        agents.reports()
        assert (paused, watchdog.paused) == ([True], False)
