"""Gradients summed over replicas during the last backward: those of one process, whatever the schedule and ZeRO."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from launch.backends.processes import run_processes
from launch.worker.build import PartitionedModel
from suite.errors import SettingError
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.partition import cell_ranges, partition
from suite.pipeline.runtime import gradient_reducer
from suite.pipeline.runtime.gradient_reducer import GradientReducer
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import OptimizerSettings
from tests.suite.pipeline.build import assemble, build, join, mini_batch, parameters_of, unpartitioned
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

STAGES, REPLICAS = 2, 2
RECIPES = (
    ScheduleConfig("fill_drain", (1,)),
    ScheduleConfig("interleaved", (UNLIMITED,), 2),
    ScheduleConfig("zero_bubble", (UNLIMITED,)),
    ScheduleConfig("zero_bubble", (UNLIMITED,), 2),
)
ENGINES = (("adamw", RECIPES[0]), ("adamw", RECIPES[1]), ("adafactor", RECIPES[-1]))  # ZeRO-1 twice, and none
MICRO_BATCHES = (5, 1)  # of all replicas: 3 and 2; 1 and none
SMALL = 100  # bytes of a bucket: several a stage, one of several parameters among them


def shares(coord, total):
    """Returns (the mini-batch, this replica's share of it) in ``total`` micro-batches."""
    tensors = toy_batch(7, seed=total)
    share = -(-total // coord.replicas)
    return mini_batch(*tensors, total), mini_batch(*tensors, share, coord.replica, coord.replicas, total)


def off(found, wanted):
    """Returns the largest difference of a gradient from the one it should be, as a share of that where it is large."""
    scale = {key: max(1.0, float(value.abs().max())) for key, value in wanted.items()}
    return max(float((found[key] - wanted[key]).abs().max()) / scale[key] for key in found)


def averaged(rank: int, world: int, rendezvous: str):
    """Returns for each case (case, difference from one process, whether equal to the bit to a reduction behind), and
    for each schedule what ``departures`` sees."""
    join(rank, world, rendezvous)
    coord, layers = RankCoord(rank, STAGES, REPLICAS), toy_layers(torch.float64)
    found, departed = [], {}
    for schedule_config in RECIPES:
        executor, ties, named, groups = build(coord, layers, SumLoss(), schedule_config)
        gradient_reducer.BUCKET_BYTES = SMALL
        both = GradientReducer(list(named.values()), ties.parameters(), groups.data_parallel)
        for total in MICRO_BATCHES:
            whole, batch = shares(coord, total)
            early, late = (_averaged(executor, ties, named, both, batch, during) for during in (True, False))
            _, wanted = unpartitioned(layers, SumLoss(), whole, 3)
            same = all(torch.equal(early[key], late[key]) for key in named)
            found.append((f"{schedule_config.schedule}, {total}", off(early, wanted), same))
        departed[schedule_config.schedule, schedule_config.virtual_stages] = departures(
            executor, ties, named, groups, shares(coord, REPLICAS)[1]
        )
    return found, departed


def _averaged(executor, ties, named, both, batch, during):
    for parameter in named.values():
        parameter.grad = None
    executor.reducer = both if during else None
    executor.train(batch, 3)
    both.start_remaining()
    ties.sum_gradients()
    both.finish()
    return {key: parameter.grad.clone() for key, parameter in named.items()}


def departures(executor, ties, named, groups, batch):
    """Returns (action, whether the stage's first weight had no gradient yet) of each departure in a step of one
    micro-batch, and how many parameters are untied."""
    gradient_reducer.BUCKET_BYTES = 1
    executor.reducer = GradientReducer(list(named.values()), ties.parameters(), groups.data_parallel)
    executor.train(batch, 2)  # all depart behind the backward
    executor.reducer.finish()
    first, seen, begin = next(p for (_, name), p in named.items() if name == "mix.weight"), [], dist.all_reduce
    for parameter in named.values():
        parameter.grad = None

    def noting(tensor, **others):
        seen.append((str(executor.status.action), first.grad is None))
        return begin(tensor, **others)

    dist.all_reduce = noting
    executor.train(batch, 3)
    dist.all_reduce = begin
    executor.reducer.finish()
    return seen, len(named) - len(ties.parameters())


@pytest.fixture(scope="module")
def workers():
    return run_processes(averaged, STAGES * REPLICAS)


def test_gradients_that_leave_early_are_those_of_one_process_and_of_a_reduction_behind(workers):
    found = [case for cases, _ in workers for case in cases]
    assert len(found) == STAGES * REPLICAS * len(RECIPES) * len(MICRO_BATCHES)
    assert not [case for case in found if not (case[1] <= 1e-12 and case[2])]


def engines(rank: int, world: int, rendezvous: str):
    """As a run has it: returns for each case (case, difference from one process), shards put together by DeepSpeed."""
    join(rank, world, rendezvous)
    gradient_reducer.BUCKET_BYTES = SMALL
    coord, layers = RankCoord(rank, STAGES, REPLICAS), toy_layers()
    found = []
    for optimizer, schedule_config in ENGINES:
        cells = partition([parameters_of(layer) for layer in layers], STAGES * schedule_config.virtual_stages)
        engine = assemble(
            coord, PartitionedModel(layers, SumLoss(), cell_ranges(cells, len(layers)), schedule_config),
            OptimizerSettings(name=optimizer)
        )  # fmt: skip
        for total in MICRO_BATCHES:
            whole, batch = shares(coord, total)
            engine.executor.train(batch, 3)
            engine.optimizer.finish_reduction()
            keys = engine.executor.stage.named_parameters()
            mine = {key: engine.optimizer.gradient(key).clone() for key in keys}
            engine.optimizer.clear()
            _, wanted = unpartitioned(layers, SumLoss(), whole, 3)
            found.append((f"{optimizer}, {schedule_config.schedule}, {total}", off(mine, wanted)))
    return found


def test_so_are_those_that_deepspeed_shares_out():
    found = [case for cases in run_processes(engines, STAGES * REPLICAS) for case in cases]
    assert len(found) == STAGES * REPLICAS * len(ENGINES) * len(MICRO_BATCHES)
    assert not [case for case in found if not case[1] <= 1e-6]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_gradient_is_sent_once_it_has_all_its_parts(monkeypatch, use_reentrant):
    """A reentrant checkpoint is a backward within the backward, which adds its own part."""
    module, sent = torch.nn.Linear(3, 3, bias=False), []
    monkeypatch.setattr(GradientReducer, "_start_reduction", lambda self, _: sent.append(module.weight.grad.clone()))
    reducer = GradientReducer([module.weight], [], None)

    def step(calls):
        """Returns the gradient that was sent in the backward, and the complete one."""
        module.weight.grad, y = None, torch.ones(2, 3, requires_grad=True)
        sent.clear()
        for _ in range(calls):
            y = checkpoint(module, y, use_reentrant=use_reentrant)
        with reducer.overlap_backward(module.parameters()):
            y.sum().backward()
        begun = [*sent]
        reducer.finish()
        return begun, module.weight.grad

    assert step(2)[0] == []  # the first step counts
    for _ in range(2):
        (part,), complete = step(2)
        assert part.equal(complete)
    if use_reentrant:
        assert step(1)[0] == []
        with pytest.raises(SettingError, match=r"shape \(3, 3\) more often than in earlier steps"):
            step(3)


def three_replicas(rank: int, world: int, rendezvous: str):
    """One stage and three replicas: returns the difference from one process, the values that are reduced to each
    replica in a step, and the size of the shards."""
    join(rank, world, rendezvous)
    gradient_reducer.BUCKET_BYTES = SMALL
    coord, layers, reduce, reduced = RankCoord(rank, 1, 3), toy_layers(), dist.reduce, [0] * 3
    model = PartitionedModel(layers, SumLoss(), [range(len(layers))], ScheduleConfig("fill_drain", (1,)))
    engine = assemble(coord, model, OptimizerSettings())
    whole, batch = shares(coord, 5)

    def counting(tensor, *, group_dst, **others):
        reduced[group_dst] += tensor.numel()
        return reduce(tensor, group_dst=group_dst, **others)

    dist.reduce = counting
    engine.executor.train(batch, 3)
    engine.optimizer.finish_reduction()
    found = {key: engine.optimizer.gradient(key).clone() for key in engine.executor.stage.named_parameters()}
    ((_, size), *_) = engine.optimizer._state.shards().places.values()
    return off(found, unpartitioned(layers, SumLoss(), whole, 3)[1]), reduced, size


def test_each_value_is_reduced_once_to_the_replica_that_owns_it():
    values = sum(parameters_of(layer) for layer in toy_layers())
    for difference, reduced, size in run_processes(three_replicas, 3):
        assert difference <= 1e-6
        assert reduced == [size, size, values - 2 * size]


def update(rank: int, world: int, rendezvous: str):
    """Returns (how, values) of each tensor that an update with ZeRO reduces, and what is said of a list of DeepSpeed's
    that lacks a parameter."""
    join(rank, world, rendezvous)
    coord, layers = RankCoord(rank, STAGES, REPLICAS), toy_layers()
    cells = cell_ranges(partition([parameters_of(layer) for layer in layers], STAGES), len(layers))
    model = PartitionedModel(layers, SumLoss(), cells, RECIPES[0])
    engine = assemble(coord, model, OptimizerSettings())
    batch, seen = shares(coord, 5)[1], []

    def noting(name, collective):
        def noted(tensor, *others, **named):
            seen.append((name, tensor.numel()))
            return collective(tensor, *others, **named)

        return noted

    sums, collectives = engine.executor.train(batch, 0), (dist.reduce, dist.all_reduce)
    dist.reduce, dist.all_reduce = noting("reduce", dist.reduce), noting("all_reduce", dist.all_reduce)
    engine.optimizer.update(sums, 0, own=(1.0, 2.0))
    dist.reduce, dist.all_reduce = collectives
    engine.executor.train(batch, 1)
    engine.optimizer._state._engine.optimizer.params_in_partition[0].pop()
    with pytest.raises(AssertionError, match="DeepSpeed gave shards of") as caught:
        engine.optimizer.finish_reduction()
    return seen, str(caught.value)


def test_an_update_reduces_norms_once_and_misses_no_parameter():
    tables = 11 * 6  # the tied table's gradient
    agreed = 6 + 2 + 2 * STAGES * REPLICAS  # squares of six layers, two losses, and each worker's own numbers
    for seen, _ in run_processes(update, STAGES * REPLICAS):
        *reduced, last = seen
        assert {name for name, _ in reduced} == {"reduce"}
        assert sum(values for _, values in reduced) == tables
        assert last == ("all_reduce", agreed)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "last"),
    [("fill_drain", 1, {"B0"}), ("interleaved", 2, {"B0.1", "B0"}), ("zero_bubble", 1, {"W0"})],
)
def test_gradients_leave_within_the_last_backward_the_last_layers_first(workers, schedule, virtual_stages, last):
    for _, departed in workers:
        seen, untied = departed[schedule, virtual_stages]
        assert len(seen) == untied
        assert {action for action, _ in seen} == last
        assert seen[0][1], "the first left when all were there"


def test_gradients_are_flattened_row_by_row_also_where_their_memory_is_not():
    gradients = [torch.arange(6.0).view(2, 3).t(), torch.arange(4.0)[::2]]
    assert gradient_reducer._flatten(gradients[:1]).tolist() == [0, 3, 1, 4, 2, 5]
    assert gradient_reducer._flatten(gradients).tolist() == [0, 3, 1, 4, 2, 5, 0, 2]
