"""Gradients averaged over replicas during the last backward: those of one process, whatever the schedule and ZeRO."""

import pytest
import torch
import torch.distributed as dist

from launch.engine import assemble
from launch.spawn import run_processes
from suite.pipeline import reduction
from suite.pipeline.partition import cell_ranges, partition
from suite.pipeline.rebuild import ALL
from suite.pipeline.recipe import Recipe
from suite.pipeline.reduction import Reduction
from suite.pipeline.topology import Place
from suite.settings import OptimizerSettings
from suite.training.optimizer import named_parameters
from tests.pipeline.build import CPU, build, join, mini_batch, parameters_of, unpartitioned
from tests.pipeline.toy import SumLoss, toy_batch, toy_layers

STAGES, REPLICAS = 2, 2
RECIPES = (
    Recipe("fill_drain", (1,)),
    Recipe("interleaved", (ALL,), 2),
    Recipe("zero_bubble", (ALL,)),
    Recipe("zero_bubble", (ALL,), 2),
)
ENGINES = (*(("adamw", recipe) for recipe in RECIPES), ("adafactor", RECIPES[-1]))  # ZeRO-1; none
MICRO_BATCHES = (5, 1)  # of all replicas: 3 and 2; 1 and none
SMALL = 100  # bytes of a bucket: several a stage, one of several parameters among them


def shares(place, total):
    """Returns (the mini-batch, this replica's share of it) in ``total`` micro-batches."""
    tensors = toy_batch(7, seed=total)
    share = -(-total // place.replicas)
    return mini_batch(*tensors, total), mini_batch(*tensors, share, place.replica, place.replicas, total)


def off(found, wanted):
    """Returns the largest difference of a gradient from the one it should be, as a share of that where it is large."""
    scale = {key: max(1.0, float(value.abs().max())) for key, value in wanted.items()}
    return max(float((found[key] - wanted[key]).abs().max()) / scale[key] for key in found)


def averaged(rank: int, world: int, rendezvous: str):
    """Returns for each case (case, difference from one process, whether equal to the bit to a reduction behind), and
    for each schedule what ``departures`` sees."""
    join(rank, world, rendezvous)
    place, layers = Place(rank, STAGES, REPLICAS), toy_layers(torch.float64)
    found, departed = [], {}
    for recipe in RECIPES:
        executor, ties, named, groups = build(place, layers, SumLoss(), recipe)
        reduction.BUCKET_BYTES = SMALL
        both = Reduction(list(named.values()), ties.parameters(), groups.replicas)
        for total in MICRO_BATCHES:
            whole, batch = shares(place, total)
            early, late = (_averaged(executor, ties, named, both, batch, during) for during in (True, False))
            _, wanted = unpartitioned(layers, SumLoss(), whole, 3)
            same = all(torch.equal(early[key], late[key]) for key in named)
            found.append((f"{recipe.schedule}, {total}", off(early, wanted), same))
        departed[recipe.schedule, recipe.turns] = departures(executor, ties, named, groups, shares(place, REPLICAS)[1])
    return found, departed


def _averaged(executor, ties, named, both, batch, during):
    for parameter in named.values():
        parameter.grad = None
    executor.reduction = both if during else None
    executor.train(batch, 3)
    both.send_rest()
    ties.sum_gradients()
    both.finish()
    return {key: parameter.grad.clone() for key, parameter in named.items()}


def departures(executor, ties, named, groups, batch):
    """Returns (action, whether the stage's first weight had no gradient yet) of each departure in a step of one
    micro-batch, and how many parameters are untied."""
    reduction.BUCKET_BYTES = 1
    executor.reduction = Reduction(list(named.values()), ties.parameters(), groups.replicas)
    first, seen, begin = next(p for (_, name), p in named.items() if name == "mix.weight"), [], dist.all_reduce
    for parameter in named.values():
        parameter.grad = None

    def noting(tensor, **others):
        seen.append((str(executor.doing.what), first.grad is None))
        return begin(tensor, **others)

    dist.all_reduce = noting
    executor.train(batch, 3)
    dist.all_reduce = begin
    executor.reduction.finish()
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
    reduction.BUCKET_BYTES = SMALL
    place, layers = Place(rank, STAGES, REPLICAS), toy_layers()
    found = []
    for optimizer, recipe in ENGINES:
        cells = partition([parameters_of(layer) for layer in layers], STAGES * recipe.turns)
        engine = assemble(
            place, layers, SumLoss(), cell_ranges(cells, len(layers)), CPU, recipe,
            OptimizerSettings(name=optimizer), seed=7,
        )  # fmt: skip
        for total in MICRO_BATCHES:
            whole, batch = shares(place, total)
            engine.executor.train(batch, 3)
            engine.optimizer.reduce()
            stage = engine.executor.stage
            keys = named_parameters(stage.indices, stage.layers)
            mine = {key: engine.optimizer.gradient(key).clone() for key in keys}
            engine.optimizer.clear()
            _, wanted = unpartitioned(layers, SumLoss(), whole, 3)
            found.append((f"{optimizer}, {recipe.schedule}, {total}", off(mine, wanted)))
    return found


def test_so_are_those_that_deepspeed_shares_out():
    found = [case for cases in run_processes(engines, STAGES * REPLICAS) for case in cases]
    assert len(found) == STAGES * REPLICAS * len(ENGINES) * len(MICRO_BATCHES)
    assert not [case for case in found if not case[1] <= 1e-6]


def update(rank: int, world: int, rendezvous: str):
    """Returns the sizes of all tensors that an update with ZeRO reduces, and what is said of a list of DeepSpeed's
    that lacks a parameter."""
    join(rank, world, rendezvous)
    place, layers = Place(rank, STAGES, REPLICAS), toy_layers()
    cells = cell_ranges(partition([parameters_of(layer) for layer in layers], STAGES), len(layers))
    engine = assemble(place, layers, SumLoss(), cells, CPU, RECIPES[0], OptimizerSettings(), seed=7)
    batch, sizes, all_reduce = shares(place, 5)[1], [], dist.all_reduce

    def noting(tensor, *others, **named):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *others, **named)

    sums = engine.executor.train(batch, 0)
    dist.all_reduce = noting
    engine.optimizer.update(sums, 0)
    dist.all_reduce = all_reduce
    engine.executor.train(batch, 1)
    engine.optimizer._engine.optimizer.params_in_partition[0].pop()
    with pytest.raises(AssertionError, match="DeepSpeed gave shards of") as told:
        engine.optimizer.reduce()
    return sizes, str(told.value)


def test_an_update_reduces_norms_once_and_misses_no_parameter():
    tables, agreed = 11 * 6, 6 + 2  # the tied table's gradient; squares of six layers and two losses
    for sizes, _ in run_processes(update, STAGES * REPLICAS):
        assert sizes == [tables, agreed]


@pytest.mark.parametrize(
    ("schedule", "turns", "last"),
    [
        ("fill_drain", 1, {"B0"}),
        ("interleaved", 2, {"B0.1", "B0"}),
        ("zero_bubble", 1, {"W0"}),
    ],
)
def test_gradients_leave_within_the_last_backward_the_last_layers_first(workers, schedule, turns, last):
    for _, departed in workers:
        seen, untied = departed[schedule, turns]
        assert len(seen) == untied
        assert {action for action, _ in seen} == last
        assert seen[0][1], "the first left when all were there"
