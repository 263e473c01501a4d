"""The peak of a worker's device, which MFU and HFU are shares of: declared by its maker, or measured once.

A measured peak is that of a large matrix product with the run's threads. It is cached beside the layer costs.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from launch.worker.devices import cpu_model
from suite.device import is_host, module_of
from suite.paths import write_atomically
from suite.pipeline.planning.devices import DEVICES, measured_product_rate
from suite.training.utilization import Peak

MEASURE_S = 0.5
"""Products are repeated for this long; the fastest counts."""

_VERSION = 4
"""Version of the measurement. Raise it when the measurement changes."""


def device_peak(device: torch.device, precision: str, cache: Path | None) -> Peak:
    """Returns the peak of matrix products of ``precision`` (fp32 or bf16) on a device.

    Declared for the GPUs that ``suite.pipeline.planning.devices`` knows; otherwise measured with this process's
    threads, or read from the folder ``cache``.
    """
    name = cpu_model() if is_host(device) else module_of(device).get_device_name(device)
    if not is_host(device) and (declared := declared_peak(name, precision)) is not None:
        return declared
    key = repr((_VERSION, name, torch.get_num_threads(), precision, torch.__version__))
    path = None if cache is None else cache / f"peak-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if path is not None:
        with suppress(OSError, ValueError, TypeError):
            return Peak(**json.loads(path.read_text()))
    peak = Peak(_measure(device, precision), "measured")
    if path is not None:
        with suppress(OSError):  # the next run measures again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(peak)))
    return peak


def declared_peak(name: str, precision: str) -> Peak | None:
    """Returns the declared peak of a GPU by the name that its driver reports; None for an unknown one.

    PCIe and NVL cards of the same name have lower clocks than the declared SXM modules, so they are measured.
    """
    words = re.split(r"[\s_-]+", name.upper())
    if "PCIE" in words or "NVL" in words:
        return None
    for known in DEVICES.values():
        if known.name.upper() in words:
            return Peak(known.bf16 if precision == "bf16" else known.fp32, "declared")
    return None


def _measure(device: torch.device, precision: str) -> float:
    rate = measured_product_rate(device, torch.bfloat16 if precision == "bf16" else torch.float32, MEASURE_S)
    if not is_host(device):
        module_of(device).reset_peak_memory_stats(device)
    return rate
