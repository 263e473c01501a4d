"""Workers that are persistently slower than their peers are named; those that are slow once, or by plan, are not."""

import random

import pytest
import torch

from suite.pipeline.model.microbatch import ReplicaBatch, even_split_sizes, replica_share
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.recorder import Recorder
from suite.training.pace import LOOK_EVERY_STEPS, LOOKS, WARM_UP_STEPS, Pace


def named(stages, replicas, seconds_of, planned=(), looks=20, units=None):
    """Returns the look in which each worker was named, by rank; ``seconds_of(look, rank)`` are its busy seconds."""
    said, found, workers = [], {}, stages * replicas
    hosts = [f"node-{rank}" for rank in range(workers)]
    pace = Pace(RankCoord(0, stages, replicas), torch.device("cpu"), 0, planned, hosts, said.append)
    units = units or [1000.0 * (rank % stages in (0, stages - 1)) for rank in range(workers)]
    for look in range(looks):
        before = len(said)
        busy_s = [seconds_of(look, rank) for rank in range(workers)]
        for name in pace.slow_workers(look * LOOK_EVERY_STEPS, busy_s, units):
            replica, stage = map(int, name.split("/")[1].removeprefix("stage.").split("."))
            found.setdefault(replica * stages + stage, look)
        assert pace.slow_workers(look * LOOK_EVERY_STEPS + 1, [0.0, *busy_s[1:]], units) == {}  # not looked at
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
    assert LOOK_EVERY_STEPS * LOOKS < 20


def test_stages_are_compared_with_their_plan_without_replicas():
    noise, planned = jitter(1, 0.2), (1.0, 5.0, 2.0, 0.5)
    # 3 times as slow as planned, all of them: another machine; stage 2 twice as slow as that
    assert named(4, 1, lambda look, rank: 3 * planned[rank] * noise() * (2 if rank == 2 else 1), planned) == {2: 2}
    assert named(4, 1, lambda look, rank: 3 * planned[rank] * noise(), planned) == {}
    assert named(4, 1, lambda look, rank: 1 + rank) == {}  # no plan


def test_a_worker_that_is_slow_now_and_then_is_not_named():
    assert named(2, 4, lambda look, rank: 2.0 if rank == 3 and look % LOOKS else 1.0) == {}
    assert named(1, 1, lambda look, rank: 1.0) == {}


@pytest.mark.parametrize(("rows", "replicas", "micro_batches"), [(6, 2, 2), (3, 2, 1), (10, 2, 4), (2100, 64, 32)])
def test_a_replica_with_a_larger_share_is_not_slow(rows, replicas, micro_batches):
    sizes = even_split_sizes(rows, replicas * micro_batches)
    dealt = [sizes[replica_share(len(sizes), replica, replicas)] for replica in range(replicas)]
    shares = [sum(own) for own in dealt]
    assert max(shares) >= 1.5 * min(shares)
    batches = [ReplicaBatch([()] * len(own), [(torch.zeros(size, 7),) for size in own], rows) for own in dealt]
    units = [batch.share * (stage == 1) for batch in batches for stage in range(2)]  # known where the loss is
    assert named(2, replicas, lambda look, rank: shares[rank // 2] * (1 + rank % 2), units=units) == {}


def test_looks_are_at_multiples_of_five_after_the_first_ten_steps_also_where_steps_are_traced():
    pace = Pace(RankCoord(0, 1, 2), torch.device("cpu"), 3, (), (), print)
    looked = []
    for step in range(3, 31):
        recorder = pace.recorder(step) or Recorder(torch.device("cpu"))
        recorder.begin()
        recorder.record("F", 0, recorder.mark())
        recorder.record("U", -1, 0.0)  # the update is left out
        pace.note(step, recorder, 7.0)
        busy_s, units = pace.take()
        assert (busy_s < 1, units in (0.0, 7.0), pace.take()) == (True, True, (0.0, 0.0))
        looked += [step] if units else []
    assert looked == [15, 20, 25, 30]
    assert looked[0] - 3 >= WARM_UP_STEPS
