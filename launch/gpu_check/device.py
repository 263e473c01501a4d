"""The device that is checked: whether it can run the check at all, and what identifies a result."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

import torch

from launch.diagnostics.node_facts import code_digest, list_gpus
from launch.gpu_check.work import Sizes, cell_workload
from launch.worker.cgroups import memory_limit_bytes
from launch.worker.devices import BF16_CAPABILITY, gpus
from models.transformer import DecoderLayer
from suite.device import is_host, module_of
from suite.errors import PlacementError, SettingError
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.memory import bytes_per_parameter


def find_device(kind: str) -> torch.device:
    """Returns the first GPU, or the CPU. Raises PlacementError for a GPU that cannot train in bf16, or none."""
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise SettingError(f"gpu-check has no device {kind!r}: --device is cuda or cpu")
    try:
        found = gpus()
    except PlacementError as error:
        raise PlacementError(f"gpu-check needs a GPU: {error}; --device cpu checks the CPU instead") from None
    if not found.has_bf16:
        raise PlacementError(
            f"{found.name}, or another GPU here, multiplies no bf16, the precision of the paper's runs; use GPUs of "
            f"compute capability {BF16_CAPABILITY}.0 or newer, such as an A100"
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
