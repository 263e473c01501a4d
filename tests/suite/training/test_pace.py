"""Workers that are persistently slower than their peers are named; those that are slow once, or by plan, are not."""

import random

import pytest
import torch

from suite.pipeline.model.topology import RankCoord
from suite.training.pace import EVERY, LOOKS, Pace


def named(stages, replicas, seconds_of, planned=(), looks=20):
    """Returns the look in which each worker was named, by rank; ``seconds_of(look, rank)`` are its busy seconds."""
    said, found = [], {}
    hosts = [f"node-{rank}" for rank in range(stages * replicas)]
    pace = Pace(RankCoord(0, stages, replicas), torch.device("cpu"), planned, hosts, said.append)
    for look in range(looks):
        before = len(said)
        busy_s = [seconds_of(look, rank) for rank in range(stages * replicas)]
        for name in pace.slow_workers(look * EVERY, busy_s):
            replica, stage = map(int, name.split("/")[1].removeprefix("stage.").split("."))
            found.setdefault(replica * stages + stage, look)
        assert pace.slow_workers(look * EVERY + 1, [0.0, *busy_s[1:]]) == {}  # not looked at
        assert len(said) - before == list(found.values()).count(look)
    assert all(f" on node-{rank} " in line for rank, line in zip(found, said, strict=True))
    return found


def jitter(seed, most):
    chance = random.Random(seed)
    return lambda: 1 + chance.uniform(0, most)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (4, 8), (16, 64)])
def test_a_slow_replica_of_a_stage_is_named_within_twenty_steps_and_no_other(stages, replicas):
    noise, bad = jitter(0, 0.2), stages * replicas - 1
    found = named(stages, replicas, lambda look, rank: (1 + rank % stages) * noise() * (1.6 if rank == bad else 1))
    assert found == {bad: LOOKS - 1}
    assert EVERY * LOOKS < 20


def test_stages_are_compared_with_their_plan_without_replicas():
    noise, planned = jitter(1, 0.2), (1.0, 5.0, 2.0, 0.5)
    # 3 times as slow as planned, all of them: another machine; stage 2 twice as slow as that
    assert named(4, 1, lambda look, rank: 3 * planned[rank] * noise() * (2 if rank == 2 else 1), planned) == {2: 2}
    assert named(4, 1, lambda look, rank: 3 * planned[rank] * noise(), planned) == {}
    assert named(4, 1, lambda look, rank: 1 + rank) == {}  # no plan


def test_a_worker_that_is_slow_now_and_then_is_not_named():
    assert named(2, 4, lambda look, rank: 2.0 if rank == 3 and look % LOOKS else 1.0) == {}
    assert named(1, 1, lambda look, rank: 1.0) == {}
