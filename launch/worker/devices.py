"""This machine's devices, and what they cannot multiply."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.hints import command
from suite.cgroups import cpu_limit, memory_limit_bytes
from suite.errors import PlacementError, first_line
from suite.log import Log

_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
"""Torch's errors where there is nothing to use."""

BF16_CAPABILITY = 8
"""The first major compute capability with products in bf16: Ampere, such as an A100."""


def this_machine() -> Cluster:
    """Returns this machine's GPUs; if it has none, its cores, each with an equal share of the memory.

    Raises PlacementError if torch cannot use the GPUs that it has.
    """
    if torch.cuda.is_available():
        return gpus()
    if fault := _gpu_fault():
        raise PlacementError(f"{fault}; CUDA_VISIBLE_DEVICES= trains on the CPU")
    return cores()


def cores() -> Cluster:
    """Returns this machine's cores, each with an equal share of the memory."""
    return Cluster(cpu_limit(), memory_limit_bytes() // cpu_limit(), "cpu")


def gpus() -> Cluster:
    """Returns the GPUs that this process sees: their number, the memory of the smallest, their name, and whether all
    multiply bf16. Raises PlacementError if there is none that torch can use."""
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        none = f"torch {torch.__version__}, which is built {built}, sees no GPU"
        raise PlacementError(_gpu_fault() or f"{none}; use a machine where nvidia-smi lists one")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Cluster(
        len(found),
        min(one.total_memory for one in found),
        "gpu",
        name=found[0].name,
        has_bf16=all(one.major >= BF16_CAPABILITY for one in found),
    )


def _gpu_fault() -> str:
    """Returns why torch cannot use this machine's GPUs; empty if it has none, hides them, or torch is built without
    CUDA. ``torch.cuda.is_available`` is False in all these cases."""
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        text = first_line(error)
        if any(absent in text for absent in _NO_GPU):
            return ""
        if old := re.search(r"too old \(found version (\d+)\)", text):
            major, minor = divmod(int(old[1]), 1000)  # 12020 is CUDA 12.2
            return (
                f"the NVIDIA driver is too old: it supports CUDA {major}.{minor // 10}, and torch {torch.__version__} "
                f"is built for CUDA {torch.version.cuda}; install a newer driver (580 for CUDA 13.0), or a torch "
                "built for an older CUDA"
            )
        return f"torch cannot use this machine's GPUs ({text}); {command('doctor')} tells more"
    return ""


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def multiplies_bf16() -> bool:
    """Returns whether this machine's processor has instructions for products in bf16; other processors emulate them.
    x86 and ARM say so; others are taken to have them."""
    features = torch.cpu.get_capabilities()
    if features.get("architecture") == "x86_64":
        return any(features.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return bool(features.get("bf16", True))


def with_available_precision(chosen: Experiment, cluster: Cluster, log: Log) -> Experiment:
    """Returns a new run's experiment, in fp32 if its devices cannot multiply bf16; then logs that. A resumed run keeps
    its precision. The processor is this machine's, also for a cluster."""
    is_gpu = cluster.kind == "gpu"
    if chosen.optimizer.precision != "bf16" or (cluster.has_bf16 if is_gpu else multiplies_bf16()):
        return chosen
    device = cluster.name or "GPU" if is_gpu else cpu_model()
    needed = f"compute capability {BF16_CAPABILITY}.0, as an A100 has" if is_gpu else "avx512_bf16 or amx_bf16"
    log(
        f"optimizer.precision is bf16, and {device} has no instructions for its products ({needed}), so it would be "
        "slower than fp32: the run uses optimizer.precision=fp32"
    )
    return chosen.with_section("optimizer", precision="fp32")
