"""How much of its devices' peak a step uses.

MFU = model operations / (seconds x devices x peak of a device)        forward and backward
HFU = hardware operations / (seconds x devices x peak of a device)     and what is recomputed (PaLM, appendix B)
"""

from __future__ import annotations

from dataclasses import dataclass

from suite.pipeline.planning.flops import StepFlops
from suite.training import metrics


@dataclass(frozen=True)
class Peak:
    """The most operations per second of one device in matrix products of a run's precision."""

    flops_per_s: float
    source: str
    """``declared`` by its maker, or ``measured`` here."""

    def __str__(self) -> str:
        for factor, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
            if self.flops_per_s >= factor:
                return f"{self.flops_per_s / factor:.3g} {unit} {self.source}"
        return f"{self.flops_per_s:.3g} FLOP/s {self.source}"


@dataclass(frozen=True)
class Utilization:
    """Computes a step's figures from the units of its mini-batch and its seconds."""

    flops: StepFlops
    """Counted for the shapes of a typical micro-batch; a step's operations are these times its units."""
    peak: Peak
    devices: int

    def values(self, units: float, seconds: float) -> dict[str, float]:
        device_s = seconds * self.devices
        model_flops_per_s = self.flops.model_per_unit * units / device_s
        hardware_flops_per_s = self.flops.hardware_per_unit * units / device_s
        return {
            metrics.TFLOPS_PER_DEVICE: model_flops_per_s / 1e12,
            metrics.MFU: model_flops_per_s / self.peak.flops_per_s,
            metrics.HFU: hardware_flops_per_s / self.peak.flops_per_s,
        }
