"""Utilization, by hand."""

import pytest

from suite.pipeline.planning.flops import StepFlops
from suite.training import metrics
from suite.training.utilization import Peak, Utilization


def test_a_device_at_half_its_peak():
    """4 units of 3e12 operations in 2 s on 3 devices: 2e12 a second on each."""
    flops = StepFlops(model_per_unit=3e12, hardware_per_unit=4.5e12)
    values = Utilization(flops, Peak(4e12, "by hand"), devices=3).values(units=4, seconds=2)
    assert values == pytest.approx({metrics.TFLOPS_PER_DEVICE: 2.0, metrics.MFU: 0.5, metrics.HFU: 0.75})
