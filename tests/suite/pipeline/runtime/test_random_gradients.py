"""Gradients of random pipelines: skips of any length, frozen parameters, any schedule, 1 to 4 stages. A stage has 1 to
4 cells; where it is the only one, it has one.

RANDOM_PIPELINES=2000 pytest -n 0 --timeout 0 tests/suite/pipeline/runtime/test_random_gradients.py      so many,
instead of a few
"""

import itertools
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.schedule.config import ScheduleConfig
from tests.marks import slow_but_for
from tests.suite.pipeline.build import build, differences, join, run, whole
from tests.suite.pipeline.random_pipelines import Pipeline, SquaredError, draw_pipeline

STAGES = (1, 2, 3, 4)
DEFAULT = 48
COUNT = int(os.environ.get("RANDOM_PIPELINES", DEFAULT))
FIRST = int(os.environ.get("RANDOM_PIPELINES_FROM", "0"))
"""The seed of the first one."""
TOLERANCE = 1e-12


def truth(pipeline: Pipeline):
    """Returns the objective and the gradients of the model as one module, None of what is frozen."""
    made, batch = whole(pipeline.layers()), pipeline.batch()
    total = torch.zeros((), dtype=torch.float64)
    for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        total = total + SquaredError()(*run(made, inputs, pipeline.seed, i), *targets)[0]
    if total.requires_grad:
        (total / batch.divisor).backward()
    return total.item(), {
        (at, name): parameter.grad for at, layer in enumerate(made) for name, parameter in layer.named_parameters()
    }


def trained(pipeline: Pipeline, rank: int):
    """Trains this stage for a step; returns its place, the objective and its parameters."""
    layers = pipeline.layers()
    coord, cells = RankCoord(rank, pipeline.stages, 1), cell_ranges(pipeline.cells, len(layers))
    executor, _, named, groups = build(coord, layers, SquaredError(), pipeline.schedule_config, cells=cells)
    coord = executor.coord
    sums = executor.train(pipeline.batch() if coord.is_first or coord.has_loss else None, pipeline.seed)
    dist.barrier()
    leave(groups)
    return coord, sums.objective, named


def faults(pipeline: Pipeline, rank: int) -> list[str]:
    """Trains this stage for a step; returns what differs from the unpartitioned model."""
    coord, own, named = trained(pipeline, rank)
    objective, expected = truth(pipeline)
    found = [
        f"{key} is frozen and has a gradient" for key, p in named.items() if not p.requires_grad and p.grad is not None
    ]
    trainable = {key: parameter for key, parameter in named.items() if parameter.requires_grad}
    wanted = {key: torch.zeros_like(p) if expected[key] is None else expected[key] for key, p in trainable.items()}
    off = differences(trainable, wanted)
    found += [f"{key} is off by {one:.3g}" for key, one in off.items() if not one <= TOLERANCE]
    if coord.has_loss and not abs(own - objective) <= TOLERANCE * objective:
        found.append(f"the objective is {own}, not {objective}")
    return found


def leave(groups) -> None:
    """Ends a pipeline's groups."""
    for group in {groups.data_parallel, groups.pipeline, *groups.activations, *groups.gradients}:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def compare(rank: int, world: int, rendezvous: str, pipelines: list[Pipeline]):
    """Returns by seed what differs on this stage."""
    join(rank, world, rendezvous)
    return [(pipeline, faults(pipeline, rank)) for pipeline in pipelines]


@pytest.mark.parametrize("stages", slow_but_for([3], STAGES))
def test_gradients_equal_the_unpartitioned_model(stages):
    count = COUNT // len(STAGES)
    check([draw_pipeline(seed, stages) for seed in range(FIRST, FIRST + count)], stages)


def check(pipelines, stages):
    results = run_processes(compare, stages, pipelines, deadline_s=7200.0)
    assert [len(found) for found in results] == [len(pipelines)] * stages
    wrong = [(pipeline, found) for result in results for pipeline, found in result if found]
    assert not wrong, f"{len({pipeline.seed for pipeline, _ in wrong})} of {len(pipelines)}: {wrong[:3]}"


def gradients_of_steps(rank: int, world: int, rendezvous: str, pipelines: list[Pipeline]):
    """Trains each for a step; returns this stage's objective and gradients."""
    join(rank, world, rendezvous)
    found = []
    for pipeline in pipelines:
        _, objective, named = trained(pipeline, rank)
        grads = {key: parameter.grad.numpy() for key, parameter in named.items() if parameter.grad is not None}
        found.append((objective, grads))
    return found


def any_stages(seed: int, stages: int) -> Pipeline:
    """Returns the pipeline of a seed, with at least 8 layers, shared tensors and nothing frozen, cut at random."""
    drawn = next(p for at in range(seed * 1000, seed * 1000 + 1000) if sum((p := draw_pipeline(at, 4)).cells) >= 8)
    count, dice = sum(drawn.cells), random.Random(seed * 10 + stages)
    cuts = [0, *sorted(dice.sample(range(1, count), stages - 1)), count]
    cells = tuple(end - begin for begin, end in itertools.pairwise(cuts))
    config = ScheduleConfig(("fill_drain", "1f1b")[seed % 2], (1,))
    dice = random.Random(seed)
    skips = tuple(
        (giver, taker, dice.choice(("output", "output", "input", kind))) for giver, taker, kind in drawn.skips
    )
    return replace(drawn, stages=stages, cells=cells, schedule_config=config, frozen=NOBODY, skips=skips)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_stages():
    """With skips and several outputs, of which some are one tensor."""
    count = max(8, COUNT // len(STAGES))
    by_stages = {}
    for stages in (1, 2, 4):
        results = run_processes(
            gradients_of_steps, stages, [any_stages(seed, stages) for seed in range(count)], deadline_s=7200.0
        )
        objectives = [objective for objective, _ in results[-1]]
        gradients = [{key: grad for of in each for key, grad in of[1].items()} for each in zip(*results, strict=True)]
        by_stages[stages] = objectives, gradients
    objectives, gradients = by_stages[1]
    for stages in (2, 4):
        assert by_stages[stages][0] == objectives
        for seed, (one, other) in enumerate(zip(gradients, by_stages[stages][1], strict=True)):
            wrong = [key for key in one.keys() & other.keys() if not np.array_equal(one[key], other[key])]
            assert not wrong, f"seed {seed}, K = {stages}: {sorted(wrong)}"


NOBODY = frozenset()
LONG = Pipeline(0, 2, ScheduleConfig("interleaved", (1,), 3), (1,) * 6, ((1, 4, "apart"),), NOBODY, 8, 4)
"""Links 1 -> 4 and 3 -> 4 join the same two stages."""
STAYING = Pipeline(0, 2, ScheduleConfig("interleaved", (1,), 2), (1, 1, 1, 4), ((0, 2, "apart"),), NOBODY, 8, 4)
"""The skip goes from a stage's first cell to its second."""


def test_so_do_those_of_skips_between_stages_of_several_cells():
    configs = [(pipeline, pipeline.schedule_config) for pipeline in (LONG, STAYING)]
    schedules = ("interleaved", "zero_bubble")
    check([replace(one, schedule_config=replace(own, schedule=name)) for one, own in configs for name in schedules], 2)
