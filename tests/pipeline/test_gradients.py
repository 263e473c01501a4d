"""Gradients, parameter by parameter, equal those of the unpartitioned model: every K, M, remat; ragged; dropout on."""

import itertools

import pytest
import torch

from launch.spawn import run_processes
from suite.pipeline.layers import distinct_parameters
from suite.pipeline.topology import Place
from tests.pipeline.build import build, join, mini_batch, unpartitioned
from tests.pipeline.toy import SumLoss, toy_batch, toy_layers

EXAMPLES = 7  # ragged for M = 2, 3, 5; fewer than M = 8
MICRO_BATCHES = (1, 2, 3, 5, 8)
REMATS = ("always", "except_last", "never")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def compare(rank: int, world: int, rendezvous: str):
    """Returns, for each case, the largest difference of this stage's gradients and of the objective."""
    join(rank, world, rendezvous)
    found = []
    for dtype in TOLERANCE:
        layers = toy_layers(dtype)
        executor, ties, named, _ = build(Place(rank, world, 1), layers, SumLoss(), "always")
        for step, (micro_batches, remat) in enumerate(itertools.product(MICRO_BATCHES, REMATS)):
            batch = mini_batch(*toy_batch(EXAMPLES, seed=step), micro_batches)
            executor.remat = remat
            for parameter in named.values():
                parameter.grad = None
            sums = executor.train(batch, step)
            ties.sum_gradients()
            objective, expected = unpartitioned(layers, SumLoss(), batch, step)
            for key, parameter in named.items():
                wanted = expected[key]
                scale = max(1.0, float(wanted.abs().max()))
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found.append((str(dtype), micro_batches, remat, key, float((gradient - wanted).abs().max()) / scale))
            if executor.place.last:
                found.append(
                    (str(dtype), micro_batches, remat, "objective", abs(sums.objective - objective) / objective)
                )
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_gradients_equal_the_unpartitioned_model(stages):
    found = [case for results in run_processes(compare, stages) for case in results]
    # every parameter of every case was compared, plus one objective a case
    parameters = sum(1 for layer in toy_layers() for _ in layer.parameters())
    assert len(found) == (parameters + 1) * len(MICRO_BATCHES) * len(REMATS) * len(TOLERANCE)
    wrong = [case for case in found if not case[-1] <= TOLERANCE[getattr(torch, case[0].split(".")[1])]]
    assert not wrong, wrong[:5]


def test_the_toy_has_a_tie_and_gradients_that_matter():
    layers = toy_layers()
    assert sum(1 for layer in layers for _ in layer.parameters()) - len(list(distinct_parameters(layers))) == 1
    _, gradients = unpartitioned(layers, SumLoss(), mini_batch(*toy_batch(EXAMPLES), 2), 0)
    zero = [key for key, gradient in gradients.items() if not gradient.abs().max() > 1e-4]
    assert zero == [(0, "idle")]
