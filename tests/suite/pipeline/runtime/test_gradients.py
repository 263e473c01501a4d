"""Gradients, parameter by parameter, equal those of the unpartitioned model: every schedule, K, M; ragged; dropout."""

import functools
import itertools
from collections import ChainMap

import pytest
import torch

from launch.backends.processes import run_processes
from models.loss import TranslationLoss
from models.transformer import TransformerShape
from models.transformer import layers as transformer_layers
from suite.pipeline.model.layers import distinct_parameters
from suite.pipeline.model.microbatch import ReplicaBatch, split
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig
from suite.pipeline.schedule.csv_file import read_rows
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS, UNLIMITED
from tests.suite.pipeline.build import build, differences, join, mini_batch, unpartitioned
from tests.suite.pipeline.torch_schedules import KINDS, dump
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

EXAMPLES = 7  # ragged for M = 3; fewer than M = 8
MICRO_BATCHES = (1, 3, 8)
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
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
CASES = {
    "toy": [*((torch.float64, count) for count in MICRO_BATCHES), (torch.float32, 3)],
    "transformer": [(torch.float64, 3)],
}
"""In fp64 a wrong order or a lost term shows; that fp32 works too needs no more than one. The toy has each kind of
tensor and each M, the Transformer dropout and attention in each schedule."""


def transformer(dtype):
    shape = TransformerShape(2, 12, 20, 2, 29, head_width=8, dropout=0.2)
    with torch.device("meta"):
        made = transformer_layers(shape)
    return [layer.to(dtype) for layer in made], TranslationLoss(0.1)


def sentences(seed, micro_batches):
    """Pairs of 7 sentences of uneven length: source and target ids, and labels, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(1, 29, (EXAMPLES, width), generator=generator) for width in (6, 5))
    labels = torch.randint(1, 29, (EXAMPLES, 5), generator=generator)
    for i in range(EXAMPLES):
        source[i, 6 - i % 4 :], target[i, 5 - i % 3 :], labels[i, 5 - i % 3 :] = 0, 0, 0
    inputs, targets = split([source, target], micro_batches), split([labels], micro_batches)
    return ReplicaBatch(inputs, targets, float((labels != 0).sum()))


def toy(dtype):
    return toy_layers(dtype), SumLoss()


def toy_sentences(seed, micro_batches):
    return mini_batch(*toy_batch(EXAMPLES, seed), micro_batches)


MODELS = {"toy": (toy, toy_sentences), "transformer": (transformer, sentences)}


@functools.cache
def truth(model: str, dtype, step: int, micro_batches: int):
    """Returns the objective and the gradients of the unpartitioned model."""
    make, batches = MODELS[model]
    return unpartitioned(*make(dtype), batches(step, micro_batches), step)


def compare(rank: int, world: int, rendezvous: str, model: str, groups):
    """Returns, for each group of schedules, what ``compare_group`` does."""
    join(rank, world, rendezvous)
    return [compare_group(RankCoord(rank, world, 1), model, schedule_configs) for schedule_configs in groups]


def compare_group(coord: RankCoord, model: str, schedule_configs):
    """Returns, for each case, the largest difference of this stage's gradients and of the objective."""
    make, batches = MODELS[model]
    found = []
    for dtype in dict(CASES[model]):
        layers, loss = make(dtype)
        executor, ties, named, _ = build(coord, layers, loss, schedule_configs[0])
        coord = executor.coord
        counts = [count for kind, count in CASES[model] if kind == dtype]
        for (step, micro_batches), schedule_config in itertools.product(enumerate(counts), schedule_configs):
            batch = batches(step, micro_batches)
            executor.schedule_config = schedule_config
            for parameter in named.values():
                parameter.grad = None
            sums = executor.train(batch, step)
            ties.sum_gradients()
            objective, expected = truth(model, dtype, step, micro_batches)
            case = (str(dtype), micro_batches, str(schedule_config))
            found += [(*case, key, difference) for key, difference in differences(named, expected).items()]
            if coord.has_loss:
                found.append((*case, "objective", abs(sums.objective - objective) / objective))
    return found


ALL = (ONE_CELL, DEFERRING, SEVERAL_CELLS, SEVERAL_CELLS_DEFERRING, ON_A_V)


@pytest.mark.parametrize(
    ("model", "stages", "groups"),
    [
        pytest.param("toy", 1, (ONE_CELL, DEFERRING), id="toy-1"),
        pytest.param("toy", 2, ALL, marks=pytest.mark.slow, id="toy-2"),
        pytest.param("toy", 3, ALL, id="toy-3"),
        pytest.param("toy", 4, (ONE_CELL,), marks=pytest.mark.slow, id="toy-4"),
        pytest.param("transformer", 3, ALL, id="transformer-3"),
    ],
)
def test_gradients_equal_the_unpartitioned_model(model, stages, groups):
    check(stages, model, groups)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_schedule_from_a_file_equal_the_unpartitioned_model(kind, stages, tmp_path):
    rows = read_rows(dump(kind, tmp_path / kind, stages, 2 * stages * max(MICRO_BATCHES)))
    check(stages, "toy", [[ScheduleConfig("csv", (graphs,), 2, rows) for graphs in (1, UNLIMITED)]])


ASCENDING = (
    ScheduleConfig("1f1b", (UNLIMITED,)),
    ScheduleConfig("zero_bubble", (1,)),
    ScheduleConfig("interleaved", (1,), 2),
    *ON_A_V,
)
"""Schedules that run the backwards of a cell from the first micro-batch to the last; fill-drain does the opposite."""


def gradients(rank: int, world: int, rendezvous: str, schedule_configs):
    """Returns, for each schedule, the bytes of this stage's gradients in fp32, with five micro-batches and with one."""
    join(rank, world, rendezvous)
    found = []
    for schedule_config in schedule_configs:
        made = {}
        executor, ties, named, _ = build(RankCoord(rank, world, 1), *toy(torch.float32), schedule_config)
        for micro_batches in (5, 1):
            for parameter in named.values():
                parameter.grad = None
            executor.train(toy_sentences(0, micro_batches), 0)
            ties.sum_gradients()
            graded = {key: parameter.grad for key, parameter in named.items() if parameter.grad is not None}
            made |= {(micro_batches, *key): gradient.numpy().tobytes() for key, gradient in graded.items()}
        found.append(made)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_of_schedules_with_one_order_of_sums_are_the_same_bits(stages):
    by_stage = run_processes(gradients, stages, (ScheduleConfig(), *ASCENDING))
    fill_drain, first, *others = (dict(ChainMap(*own)) for own in zip(*by_stage, strict=True))
    assert all(other == first for other in others)
    assert fill_drain.keys() == first.keys()
    assert {
        micro_batches for micro_batches, *key in first if first[micro_batches, *key] != fill_drain[micro_batches, *key]
    } == {5}


def check(stages, model, groups):
    """Trains all groups in the same processes; each has stages of its own."""
    parameters = sum(1 for layer in MODELS[model][0](torch.float32)[0] for _ in layer.parameters())
    for schedule_configs, *by_stage in zip(groups, *run_processes(compare, stages, model, groups), strict=True):
        found = [case for of_stage in by_stage for case in of_stage]
        # every parameter of every case was compared, plus one objective a case
        assert len(found) == (parameters + 1) * len(schedule_configs) * len(CASES[model])
        wrong = [case for case in found if not case[-1] <= TOLERANCE[getattr(torch, case[0].split(".")[1])]]
        assert not wrong, wrong[:5]


def test_the_toy_has_a_tie_and_gradients_that_matter():
    layers = toy_layers()
    assert sum(1 for layer in layers for _ in layer.parameters()) - len(list(distinct_parameters(layers))) == 1
    _, gradients = unpartitioned(layers, SumLoss(), mini_batch(*toy_batch(EXAMPLES), 2), 0)
    zero = [key for key, gradient in gradients.items() if not gradient.abs().max() > 1e-4]
    assert zero == [(0, "idle")]
