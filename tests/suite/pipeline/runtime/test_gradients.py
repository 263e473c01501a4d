"""Gradients, parameter by parameter, equal those of the unpartitioned model: every schedule, K, M; ragged; dropout."""

import functools
import itertools

import pytest
import torch

from launch.backends.processes import run_processes
from models.loss import TranslationLoss
from models.transformer import TransformerShape
from models.transformer import layers as transformer_layers
from suite.pipeline.model.layers import distinct_parameters
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig
from suite.pipeline.schedule.csv_file import read_rows
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS, UNLIMITED
from tests.micro_batches import split
from tests.suite.pipeline.build import build, differences, join, mini_batch, unpartitioned
from tests.suite.pipeline.freezing import FREEZES, frozen_toy
from tests.suite.pipeline.torch_schedules import KINDS, dump
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

EXAMPLES = 7  # ragged for M = 3; fewer than M = 8
REMATS = ("always", "except_last", "never")
ONE_CELL = (
    *(ScheduleConfig("fill_drain", (MAX_LIVE_GRAPHS[remat],)) for remat in REMATS),
    *(ScheduleConfig("1f1b", (graphs,)) for graphs in (1, UNLIMITED)),
    ScheduleConfig("fill_drain", (2,)),
)
DEFERRING = (ScheduleConfig("zero_bubble", (1,)), ScheduleConfig("zero_bubble", (UNLIMITED,)))
SEVERAL_CELLS = (
    ScheduleConfig("interleaved", (0,), 2),
    ScheduleConfig("interleaved", (2,), 2),
    ScheduleConfig("interleaved", (UNLIMITED,), 2),
)
ON_A_V = tuple(ScheduleConfig(name, (graphs,), 2) for name in V_SHAPED for graphs in (1, UNLIMITED))
SEVERAL_CELLS_DEFERRING = (ScheduleConfig("zero_bubble", (1,), 2), ScheduleConfig("zero_bubble", (UNLIMITED,), 2))
TOLERANCE = 1e-12
"""In fp64 a wrong order or a lost term shows."""
MICRO_BATCHES = (1, 3, 8)
"""For the toy, which has each kind of tensor; other models have three."""


def transformer():
    shape = TransformerShape(2, 12, 20, 2, 29, head_width=8, dropout=0.2)
    with torch.device("meta"):
        made = transformer_layers(shape)
    return [layer.double() for layer in made], TranslationLoss(0.1)


def sentences(seed, micro_batches):
    """Pairs of 7 sentences of uneven length: source and target ids, and labels, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(1, 29, (EXAMPLES, width), generator=generator) for width in (6, 5))
    labels = torch.randint(1, 29, (EXAMPLES, 5), generator=generator)
    for i in range(EXAMPLES):
        source[i, 6 - i % 4 :], target[i, 5 - i % 3 :], labels[i, 5 - i % 3 :] = 0, 0, 0
    inputs, targets = split([source, target], micro_batches), split([labels], micro_batches)
    return ReplicaBatch(inputs, targets, float((labels != 0).sum()))


def toy():
    return toy_layers(torch.float64), SumLoss()


def toy_sentences(seed, micro_batches):
    return mini_batch(*toy_batch(EXAMPLES, seed), micro_batches)


def frozen(name):
    return frozen_toy(name, torch.float64), SumLoss()


MODELS = {"toy": (toy, toy_sentences), "transformer": (transformer, sentences)}
MODELS |= {f"frozen: {name}": (functools.partial(frozen, name), toy_sentences) for name in FREEZES}


@functools.cache
def truth(model: str, step: int, micro_batches: int):
    """Returns the objective and the gradients of the unpartitioned model."""
    make, batches = MODELS[model]
    return unpartitioned(*make(), batches(step, micro_batches), step)


def counts_of(model: str):
    return MICRO_BATCHES if model == "toy" else (3,)


def compare(rank: int, world: int, rendezvous: str, cases):
    """Returns, for each model with a group of schedules, what ``compare_group`` does."""
    join(rank, world, rendezvous)
    return [compare_group(RankCoord(rank, world, 1), *case) for case in cases]


def compare_group(coord: RankCoord, model: str, schedule_configs):
    """Returns, for each case, the largest difference of this stage's gradients and of the objective."""
    make, batches = MODELS[model]
    layers, loss = make()
    executor, ties, named, _ = build(coord, layers, loss, schedule_configs[0])
    found = []
    for (step, micro_batches), schedule_config in itertools.product(enumerate(counts_of(model)), schedule_configs):
        executor.schedule_config = schedule_config
        for parameter in named.values():
            parameter.grad = None
        sums = executor.train(batches(step, micro_batches), step)
        ties.sum_gradients()
        assert all(parameter.requires_grad or parameter.grad is None for parameter in named.values())
        objective, expected = truth(model, step, micro_batches)
        case = (micro_batches, str(schedule_config))
        found += [(*case, key, difference) for key, difference in differences(named, expected).items()]
        if executor.coord.has_loss:
            found.append((*case, "objective", abs(sums.objective - objective) / objective))
    return found


ALL = (ONE_CELL, DEFERRING, SEVERAL_CELLS, SEVERAL_CELLS_DEFERRING, ON_A_V)
FROZEN = [
    (f"frozen: {name}", [(SEVERAL_CELLS[1], SEVERAL_CELLS_DEFERRING[1])[at % 2]]) for at, name in enumerate(FREEZES)
]


def groups_of(model, groups):
    return [(model, group) for group in groups]


@pytest.mark.parametrize(
    ("stages", "cases"),
    [
        pytest.param(1, groups_of("toy", (ONE_CELL, DEFERRING)), id="toy-1"),
        pytest.param(2, groups_of("toy", ALL), marks=pytest.mark.slow, id="toy-2"),
        pytest.param(3, groups_of("toy", ALL), id="toy-3"),
        pytest.param(4, groups_of("toy", (ONE_CELL,)), marks=pytest.mark.slow, id="toy-4"),
        pytest.param(3, groups_of("transformer", [group[:1] for group in ALL]) + FROZEN, id="transformer-and-frozen-3"),
        pytest.param(3, groups_of("transformer", ALL), marks=pytest.mark.slow, id="transformer-3"),
    ],
)
def test_gradients_equal_the_unpartitioned_model(stages, cases):
    """The schedules that come first recompute."""
    check(stages, cases)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_schedule_from_a_file_equal_the_unpartitioned_model(kind, stages, tmp_path):
    rows = read_rows(dump(kind, tmp_path / kind, stages, 2 * stages * max(MICRO_BATCHES)))
    check(stages, [("toy", [ScheduleConfig("csv", (graphs,), 2, rows) for graphs in (1, UNLIMITED)])])


def check(stages, cases):
    """Trains all cases in the same processes; each has stages of its own."""
    for (model, schedule_configs), *by_stage in zip(cases, *run_processes(compare, stages, cases), strict=True):
        found = [case for of_stage in by_stage for case in of_stage]
        # every parameter of every case was compared, plus one objective a case
        parameters = sum(1 for layer in MODELS[model][0]()[0] for _ in layer.parameters())
        assert len(found) == (parameters + 1) * len(schedule_configs) * len(counts_of(model))
        wrong = [case for case in found if not case[-1] <= TOLERANCE]
        assert not wrong, (model, wrong[:5])


def test_the_toy_has_a_tie_and_gradients_that_matter():
    layers = toy_layers()
    assert sum(1 for layer in layers for _ in layer.parameters()) - len(list(distinct_parameters(layers))) == 1
    _, gradients = unpartitioned(layers, SumLoss(), mini_batch(*toy_batch(EXAMPLES), 2), 0)
    zero = [key for key, gradient in gradients.items() if not gradient.abs().max() > 1e-4]
    assert zero == [(0, "idle")]
