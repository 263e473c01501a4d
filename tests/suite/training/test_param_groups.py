"""Parameters with a learning rate and a weight decay of their own go where plain torch takes them."""

import numpy as np
import pytest

from launch.backends.processes import run_processes
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.build import join
from tests.suite.training.test_frozen import assert_close, by_torch
from tests.suite.training.work import merge, trained

STEPS, MIDDLE = 6, 3
OPTIMIZERS = ("adamw", "sgd", "rmsprop", "adafactor")
SCHEDULE = ScheduleConfig("1f1b", (UNLIMITED,))


def factors(name, parameter):
    """Layer-wise rates; no decay of biases, nor of ``5.out.bias`` and ``0.idle`` any update: groups of few values."""
    layer = int(name.split(".")[0])
    return 0.0 if name in ("5.out.bias", "0.idle") else 0.5 ** (5 - layer), float(parameter.ndim > 1)


def cases(rank, world, rendezvous, stages, replicas, folder):
    """Returns for each optimizer what ``trained`` does of six steps, and of those after a checkpoint of the third."""
    join(rank, world, rendezvous)
    found = {}
    for optimizer in OPTIMIZERS:
        options = {"optimizer": optimizer, "schedule_config": SCHEDULE, "factors": factors}
        whole = trained(rank, stages, replicas, STEPS, **options)
        trained(rank, stages, replicas, MIDDLE, f"{folder}/{optimizer}", **options)
        found[optimizer] = whole, trained(rank, stages, replicas, STEPS, f"{folder}/{optimizer}", True, **options)
    return found


PIPELINES = [(1, 1), (2, 2), *(pytest.param(pipeline, marks=pytest.mark.slow) for pipeline in ((2, 1), (1, 3)))]


@pytest.fixture(scope="module", params=PIPELINES, ids=str)
def found(request, tmp_path_factory):
    """Two and three replicas have ZeRO-1 but for Adafactor, three of them stretches without a value."""
    stages, replicas = request.param
    folder = str(tmp_path_factory.mktemp("groups"))
    results = run_processes(cases, stages * replicas, stages, replicas, folder)
    return {name: [merge(kind) for kind in zip(*(one[name] for one in results), strict=True)] for name in OPTIMIZERS}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_norms_and_values_are_those_of_torch(found, optimizer):
    losses, weights = found[optimizer][0]
    assert_close((losses, weights), by_torch("nothing", optimizer, factors))
    assert np.array_equal(weights[0, "table"], weights[3, "table"])  # copies of the tied parameter


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_has_the_same_bits(found, optimizer):
    (losses, weights), (resumed_losses, resumed) = found[optimizer]
    assert resumed_losses == losses[MIDDLE:]
    assert all(np.array_equal(weights[key], resumed[key]) for key in weights)
