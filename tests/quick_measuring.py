"""Measures layers in the fewest rounds: a plan's seconds are rough then, its bytes are the same."""

import pytest

from launch.worker.measure import measure_layers
from suite.pipeline.planning import measure
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate


def estimates(work):
    """Returns the layer costs that a measurement starts from."""
    return estimate(*work.build(), work.sample().largest, DEVICES["TPUv3"], work.optimizer)


def measure_quickly(rank, world, rendezvous, *args, **options):
    """``measure_layers``, in a process of its own."""
    measure.SECONDS_A_LAYER = 0.0
    return measure_layers(rank, world, rendezvous, *args, **options)


@pytest.fixture(autouse=True, scope="module")
def _measures_quickly(request):
    """Runs that a test starts in its own process measure quickly; those in other processes, and benchmarks, measure as
    users' do."""
    with pytest.MonkeyPatch.context() as patch:
        if "bench" not in request.path.parts:
            patch.setattr("launch.worker.measure.measure_layers", measure_quickly)
        yield
