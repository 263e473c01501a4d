"""The operations that a run's workers are given: counted, or absent and said so."""

import pytest

from experiments.base.cluster import Cluster
from experiments.planning.problem import estimated_costs
from experiments.planning.request import plan_request
from experiments.registry import find
from launch.train.session import _step_flops
from suite.pipeline.planning.devices import DEVICES


def plan(name, settings):
    cluster = Cluster(4, 2**36, "gpu", device=DEVICES["H100"])
    return plan_request(find(name).with_settings(settings), cluster, estimated_costs)


@pytest.mark.slow
def test_flops_per_image_ignore_the_batch_size_and_recomputes_count_as_hardware_alone():
    shape = "pipeline.stages=2 pipeline.replicas=2 pipeline.micro_batches=4 train.batch_images="
    recomputing = plan("amoebanet_fashion", f"{shape}64 pipeline.remat=except_last").step_flops()
    keeping = plan("amoebanet_fashion", f"{shape}100 pipeline.remat=never").step_flops()
    assert recomputing.model_per_unit == pytest.approx(keeping.model_per_unit)  # of micro-batches of 8, and of 12 or 13
    assert keeping.hardware_per_unit == keeping.model_per_unit
    forwards_again = (recomputing.hardware_per_unit - recomputing.model_per_unit) / recomputing.model_per_unit
    assert forwards_again == pytest.approx(3 / 4 / 3, rel=0.02)  # 3 of 4 micro-batches; a third of a step is forward


def test_a_run_whose_operations_cannot_be_counted_has_none_and_says_why():
    class Planned:
        def step_flops(self):
            raise RuntimeError("a layer needs values")

    logged = []
    assert _step_flops(Planned(), logged.append) is None
    expected = "the run has no FLOP/s and no MFU, because counting failed: RuntimeError: a layer needs values"
    assert logged == [expected]
