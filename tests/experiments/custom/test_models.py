"""Models that were not written for the suite: gradients and losses of the pipeline, compared with plain autograd."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.custom.batches import SpecBatches
from experiments.custom.layers import on_meta, tie_shared
from experiments.custom.loss import SummedLoss
from experiments.custom.spec_check import layers_of
from launch.backends.processes import run_processes
from suite.pipeline.model.microbatch import even_split_sizes
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.sample import MicroBatch
from suite.pipeline.runtime.skip import call
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import OptimizerSettings
from tests.experiments.custom import models
from tests.suite.pipeline.build import build, join

STAGES = (1, 3)
SCHEDULES = (ScheduleConfig("fill_drain", (1,)), ScheduleConfig("zero_bubble", (UNLIMITED,)))


def make(name):
    torch.manual_seed(0)
    return getattr(models, name)()


def train(rank, world, rendezvous):
    """Returns, for each model and schedule, this stage's gradients, and the loss on the last stage."""
    join(rank, world, rendezvous)
    results = {}
    for name in (model.__name__ for model in models.MODELS):
        for schedule_config in SCHEDULES:
            spec = make(name)
            layers = layers_of(spec)
            tie_shared(layers)
            batches = SpecBatches(spec, models.ROWS, seed=0)
            loss = SummedLoss(spec, targets=1)
            coord = RankCoord(rank, world, 1)
            executor, ties, parameters, _ = build(coord, [on_meta(layer) for layer in layers], loss, schedule_config)
            batch = batches.batch(0, 0, 1, spec.micro_batches)
            sums = executor.train(batch, 0)
            ties.sum_gradients()
            results[name, schedule_config.schedule] = (
                {key: None if value.grad is None else value.grad.numpy() for key, value in parameters.items()},
                sums.objective / batch.divisor if coord.has_loss else None,
            )
    return results


def reference(name):
    """Returns autograd's gradients of the model as its author wrote it, and its loss."""
    spec = make(name)
    inputs, targets = SpecBatches(spec, models.ROWS, seed=0).whole(0)
    rows = (
        even_split_sizes(models.ROWS, spec.micro_batches)
        if getattr(models, name) in models.BATCH_NORM
        else [models.ROWS]
    )
    loss, first = 0.0, 0
    for count in rows:
        part = slice(first, first + count)
        tensors, stash = tuple(tensor[part] for tensor in inputs), {}
        for layer in spec.layers:
            tensors = call(layer, tensors, stash)
        share = count if getattr(spec.loss, "reduction", "mean") == "mean" else 1
        loss = loss + spec.loss(*tensors, *(target[part] for target in targets)) * share / models.ROWS
        first += count
    loss.backward()
    return {
        (index, key): parameter.grad
        for index, layer in enumerate(spec.layers)
        for key, parameter in layer.named_parameters()
    }, float(loss.detach())


@pytest.fixture(scope="module")
def runs():
    return {stages: run_processes(train, stages) for stages in STAGES}


@pytest.fixture(scope="module", params=[model.__name__ for model in models.MODELS])
def expected(request):
    return request.param, *reference(request.param)


@pytest.mark.parametrize("stages", STAGES)
def test_gradients_are_those_of_plain_autograd(runs, expected, stages):
    name, gradients, loss = expected
    for schedule_config in SCHEDULES:
        found = {}
        for worker in runs[stages]:
            own, objective = worker[name, schedule_config.schedule]
            found |= own
        assert objective == pytest.approx(loss, rel=1e-12)
        assert {key for key, value in found.items() if value is not None} >= {
            key for key, value in gradients.items() if value is not None
        }
        for key, value in found.items():
            if gradients.get(key) is None:
                assert value is None or not value.any(), key
            else:
                assert abs(value - gradients[key].numpy()).max() <= 1e-12, key


def test_losses_are_bit_equal_for_every_k(runs):
    for name in (model.__name__ for model in models.MODELS):
        assert len({runs[stages][-1][name, "fill_drain"][1] for stages in runs}) == 1, name


@pytest.mark.parametrize("name", ["llama", "lstm_stack", "u_net", "frozen", "two_inputs"])
def test_operations_are_those_that_torch_counts(name):
    spec = make(name)
    layers = layers_of(spec)
    batch = SpecBatches(spec, models.ROWS, seed=0).batch(0, 0, 1, spec.micro_batches)
    inputs, targets, loss = batch.inputs[0], batch.targets[0], SummedLoss(spec, targets=1)
    made, micro_batch = [on_meta(layer) for layer in layers], MicroBatch(inputs, targets)
    counts = estimate(made, loss, micro_batch, DEVICES["TPUv3"], OptimizerSettings())
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            tensors, stash = inputs, {}
            for layer in layers:
                tensors = call(layer, tensors, stash)
            objective, _ = loss(*tensors, *targets)
        with FlopCounterMode(display=False) as backward:
            objective.backward()
    assert sum(count.forward_flops for count in counts) == forward.get_total_flops() > 0
    assert sum(count.backward_flops for count in counts) == backward.get_total_flops()
