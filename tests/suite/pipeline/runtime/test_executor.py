"""The executor in real processes: changing shapes, odd boundaries, evaluation between, few micro-batches, stalls."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launch.backends.processes import run_processes
from suite.errors import PeerLostError, StallError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.p2p import InflightSends, MessageTimeout
from suite.pipeline.schedule.config import ScheduleConfig
from tests.suite.pipeline.build import alone, build, differences, join, mini_batch, unpartitioned
from tests.suite.pipeline.toy import SquareLoss, SumLoss, toy_batch, toy_layers


class Odd(nn.Module):
    """Returns a random choice of tensors, some carrying gradients, some not, some empty, some of integers."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        nn.init.normal_(self.weight)

    def forward(self, *tensors):
        chance = random.Random(self.seed)
        first = tensors[0] * self.weight + sum(t.sum() * 1e-2 for t in tensors[1:] if t.is_floating_point())
        extra = {
            "grad": lambda: torch.tanh(first) * chance.random(),
            "none": lambda: first.detach() * 2,
            "ints": lambda: torch.arange(chance.randint(1, 4), device=first.device),
            "mask": lambda: torch.ones(2, 2, dtype=torch.bool, device=first.device),
            "void": lambda: torch.empty(0, 3, device=first.device),
            "half": lambda: first.to(torch.bfloat16),
            "same": lambda: tensors[-1],
            "idle": lambda: self.weight * 3,
        }
        chosen = [chance.choice(sorted(extra)) for _ in range(chance.randint(0, 4))]
        return (first, *[extra[name]() for name in chosen])


class OddLoss(nn.Module):
    def forward(self, *tensors):
        target = tensors[-1]
        objective = (tensors[0] - target).square().sum()
        return objective, objective.detach()


def odd_cases(rank, world, rendezvous, cases):
    join(rank, world, rendezvous)
    found = []
    for case in range(cases):
        with torch.device("meta"):
            layers = [Odd(1000 * case + index) for index in range(2 * world)]
        executor, _, named, _ = build(RankCoord(rank, world, 1), layers, OddLoss(), ("always", "never")[case % 2])
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(case))
        batch = ReplicaBatch([(part,) for part in inputs.split(2)], [(part * 0.5,) for part in inputs.split(2)], 5.0)
        executor.train(batch, step=case)
        _, expected = unpartitioned(layers, OddLoss(), batch, case)
        found += differences(named, expected).values()
    return found


def test_random_boundaries_over_three_stages_give_the_unpartitioned_gradients():
    found = [difference for results in run_processes(odd_cases, 3, 10) for difference in results]
    assert len(found) == 10 * 6
    assert all(difference < 1e-5 for difference in found)


def mixed_work(rank, world, rendezvous, schedule_configs):
    """Trains and evaluates with other shapes and counts each time, at last without any micro-batch; returns what this
    stage saw with each schedule."""
    join(rank, world, rendezvous)
    found = []
    for schedule_config in schedule_configs:
        executor, _, _, _ = build(RankCoord(rank, world, 1), toy_layers(torch.float64), SumLoss(), schedule_config)
        seen = []
        for step, (examples, micro_batches, train) in enumerate(
            [(7, 3, True), (4, 4, False), (4, 2, False), (1, 4, True), (12, 5, True), (3, 1, False)]
        ):
            batch = mini_batch(*toy_batch(examples, seed=step), micro_batches)
            batch = batch if executor.coord.is_first or executor.coord.has_loss else None
            seen.append(objective(executor, batch, step, train))
        assert executor.train(ReplicaBatch([], [], 1.0), 9).objective == 0
        found.append(seen)
    return found


def objective(executor, batch, step, train):
    """Trains or evaluates; returns the objective of the whole mini-batch."""
    if train:
        return executor.train(batch, step).objective
    return sum(sums.objective for sums in executor.evaluate(batch, step))


def test_train_evaluate_evaluate_train_with_new_shapes_each_time_and_with_nothing():
    one_cell, two_cells = ScheduleConfig("fill_drain", (1,)), ScheduleConfig("interleaved", (1,), 2)
    ((whole,),) = run_processes(mixed_work, 1, [one_cell])
    first, _, last = run_processes(mixed_work, 3, [one_cell, two_cells])
    assert last == [whole] * 2
    assert first == [[0.0] * 6] * 2
    assert all(objective > 0 for objective in whole)


def test_evaluation_does_not_depend_on_the_step_and_training_does():
    executor, batch = alone(toy_layers(), SumLoss(), ScheduleConfig()), mini_batch(*toy_batch(4), 2)
    first, again = (objective(executor, batch, step, train=False) for step in (0, 1))
    trained, later = (objective(executor, batch, step, train=True) for step in (0, 1))
    assert first == again
    assert len({first, trained, later}) == 3


class Frozen(nn.Linear):
    """A module in it stays in evaluation mode, as its own ``train`` says."""

    def __init__(self, width):
        super().__init__(width, width)
        self.inner, self.modes = nn.Dropout(), []

    def train(self, mode=True):
        super().train(mode)
        self.inner.eval()
        return self

    def forward(self, x):
        self.modes.append((self.training, self.inner.training))
        return super().forward(x.float())


def test_the_first_step_and_the_one_after_an_evaluation_train_in_the_modes_of_the_layers_own_train():
    with torch.device("meta"):
        layers = [Frozen(5), Frozen(5)]
    executor, batch = alone(layers, SquareLoss(), ScheduleConfig()), mini_batch(*toy_batch(4), 1)
    for train in (True, False, True):
        objective(executor, batch, 0, train)
    assert [*dict.fromkeys(executor.stage.by_index[0].modes)] == [(True, False), (False, False)]


def test_a_stage_says_once_in_a_training_step_that_it_begins_to_drain():
    executor, actions, counts = alone(toy_layers(), SumLoss(), ScheduleConfig()), [], []
    executor.on_first_backward = lambda: actions.append(str(executor.status.action))
    for run in (executor.train, executor.evaluate, executor.train):
        run(mini_batch(*toy_batch(6), 3), 0)
        counts.append(len(actions))
    assert actions == ["B2", "B2"]
    assert counts == [1, 1, 2]


def test_a_send_over_a_connection_that_is_already_closed_is_a_lost_neighbour(monkeypatch):
    """gloo's words; whether it fails already at the send depends on when it notices the other end."""

    def closed(*args, **kwargs):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6566")

    monkeypatch.setattr(dist, "isend", closed)
    with pytest.raises(PeerLostError, match="the gradients of micro-batch 2; that process has ended"):
        InflightSends(MessageTimeout(1.0)).post([torch.ones(1)], 1, None, 0, "the gradients of micro-batch 2")


@pytest.mark.parametrize(("train", "when"), [(True, "step 5"), (False, "evaluation")])
def test_a_stall_says_where_it_was(train, when, monkeypatch):
    def stalls(*_):
        raise StallError("waited 2 s")

    executor, batch = alone(toy_layers(), SumLoss(), ScheduleConfig()), mini_batch(*toy_batch(8), 4)
    monkeypatch.setattr(executor.stage, "forward", stalls)
    with pytest.raises(StallError, match=f"^replica 0, stage 0, {when}, at F0: waited 2 s$"):
        executor.train(batch, 4) if train else executor.evaluate(batch, 4)


def stall(rank, world, rendezvous):
    """Stage 0 sleeps in its second forward; stage 1 waits a second for it."""
    join(rank, world, rendezvous)
    executor, *_ = build(RankCoord(rank, world, 1), toy_layers(), SumLoss(), "always")
    executor.links[0].p2p.timeout.seconds = 1.0
    forward = executor.stage.forward

    def slow(micro_batch, *targets):
        time.sleep(5 if (rank, micro_batch.index) == (0, 1) else 0)
        return forward(micro_batch, *targets)

    executor.stage.forward = slow
    executor.train(mini_batch(*toy_batch(6), 3), 4)


@pytest.mark.slow
def test_a_stage_that_falls_silent_is_named_within_the_deadline():
    message = "replica 0, stage 1, step 5, at F1: waited 1 s for the activations from stage 0"
    with pytest.raises(StallError, match=message):
        run_processes(stall, 2)


def test_the_stream_of_a_device_is_marked_where_each_action_begins_to_compute_and_where_it_ends(monkeypatch):
    class Event:
        def record(self):
            self.done = executor.status.action

    monkeypatch.setattr("suite.pipeline.runtime.executor.is_host", lambda device: False)
    monkeypatch.setattr("suite.pipeline.runtime.executor.module_of", lambda device: SimpleNamespace(Event=Event))
    executor, batch = alone(toy_layers(), SumLoss(), ScheduleConfig()), mini_batch(*toy_batch(8), 4)
    executor.train(batch, 0)
    marks = executor.status.device_marks
    expected = [action for action in ScheduleConfig().actions(1, len(batch))[0] for _ in range(2)]
    assert [mark.action for mark in marks] == expected
    assert {mark.waiting for mark in marks} == {""}  # one stage gets no message
    assert [mark.event.done for mark in marks] == expected
