"""The device that is checked: whether it can run the check at all, and what identifies a result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

from launch.diagnostics.node_facts import code_digest, list_gpus
from launch.gpu_check.work import Sizes, cell_workload
from launch.worker.cgroups import memory_limit_bytes
from models.transformer import DecoderLayer
from suite.device import is_host, module_of
from suite.errors import PlacementError, SettingError, first_line
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.memory import bytes_per_parameter


def find_device(kind: str) -> torch.device:
    """Returns the first GPU, or the CPU. Raises PlacementError for a GPU that cannot train in bf16, or none."""
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise SettingError(f"gpu-check has no device {kind!r}: --device is cuda or cpu")
    built = f"torch {torch.__version__} is built {_built_for()}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        name = torch.cuda.get_device_name(0)
    except (RuntimeError, AssertionError) as error:
        gpus, _ = list_gpus()
        if "too old" in str(error):
            driver = f"NVIDIA driver {gpus[0].driver}" if gpus else "NVIDIA driver"
            raise PlacementError(
                f"the {driver} is too old: {built}; install a newer driver (580 for CUDA 13.0), or a torch built for "
                "an older CUDA"
            ) from None
        raise PlacementError(
            f"gpu-check needs a CUDA device, and torch sees none ({first_line(error)}); {built}: run it where "
            "nvidia-smi lists a GPU, or with --device cpu"
        ) from None
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        major, minor = torch.cuda.get_device_capability(0)
        raise PlacementError(
            f"{name} has compute capability {major}.{minor}, which does not support bf16, the precision of the paper's "
            "runs here; use a GPU of 8.0 or newer, such as an A100"
        )
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def require_memory(sizes: Sizes, device: torch.device) -> None:
    """Raises PlacementError if the device holds less than one layer's weights, gradients and optimizer state."""
    layer = cell_workload(sizes, DecoderLayer).layers[0]
    needed = sum(p.numel() for p in layer.parameters()) * bytes_per_parameter(sizes.optimizer, replicas=1)
    available = memory_bytes(device)
    if available < needed:
        raise PlacementError(
            f"gpu-check trains layers of {needed / GIB:.2f} GiB each, with gradients and optimizer state, and the "
            f"{'CPU' if is_host(device) else 'GPU'} has {available / GIB:.2f} GiB; use a larger device"
        )


def memory_bytes(device: torch.device) -> int:
    """Returns the bytes that are free on a GPU, or that this process may use on a CPU."""
    return memory_limit_bytes() if is_host(device) else int(module_of(device).mem_get_info(device)[0])


def identity(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Returns what must be equal for a result to be taken from an earlier call: settings, device, versions."""
    machine: dict[str, Any] = {"processor": platform.machine(), "cores": os.cpu_count(), "name": device.type}
    if not is_host(device):
        properties, (gpus, _) = torch.cuda.get_device_properties(device), list_gpus()
        machine |= {
            "name": properties.name, "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}", "gpus": torch.cuda.device_count(),
            "driver": gpus[0].driver if gpus else None,
        }  # fmt: skip
    return {
        "machine": machine,
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "code": code_digest(),
        },
        "sizes": asdict(sizes) | {"optimizer": sizes.optimizer.model_dump(mode="json")},
    }  # fmt: skip


def missing() -> list[str]:
    """Returns what the check leaves out because a package is not installed, a sentence each."""
    without = {
        "deepspeed": "DeepSpeed is not installed: updates are by the torch optimizer that it wraps at K = R = 1.",
        "ray": "Ray is not installed: nothing about a cluster is checked; make doctor does that.",
    }
    return [sentence for name, sentence in without.items() if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _built_for() -> str:
    return f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
