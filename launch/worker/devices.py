"""This machine's devices."""

from __future__ import annotations

import platform
from pathlib import Path

from experiments.base.cluster import Cluster
from launch.worker.cgroups import cpu_limit, memory_limit_bytes


def this_machine() -> Cluster:
    """Returns this machine's GPUs; if it has none, its cores, each with an equal share of the memory."""
    import torch

    if torch.cuda.is_available():
        return gpus()
    return Cluster(cpu_limit(), memory_limit_bytes() // cpu_limit(), "cpu")


def gpus() -> Cluster:
    """Returns the GPUs that this process sees: their number, the memory of the smallest, their name."""
    import torch

    count = torch.cuda.device_count()
    smallest = min(torch.cuda.get_device_properties(index).total_memory for index in range(count))
    return Cluster(count, smallest, "gpu", name=torch.cuda.get_device_name(0))


def cpu_model() -> str:
    """Returns the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def multiplies_bf16() -> bool:
    """Returns whether this machine's processor has instructions for products in bf16; other processors emulate them.
    x86 and ARM say so; others are taken to have them."""
    import torch

    features = torch.cpu.get_capabilities()
    if features.get("architecture") == "x86_64":
        return any(features.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return bool(features.get("bf16", True))
