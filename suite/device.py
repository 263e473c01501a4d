"""What a kind of device needs. The CPU is the host itself; any other device works while the host runs ahead of it.

    cpu                  the host computes, so a result is there when the call returns
    cuda, or another     torch's module of that name, such as ``torch.cuda``, has what is needed: ``synchronize``,
                         ``Event``, ``default_generators``, ``memory_allocated``, ...

Code that depends on the device asks here or that module, never for CUDA by name. So all devices that are not the CPU
take the same branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

MULTIPLIES_BF16_INTO_FP32 = ("cuda", "xpu")
"""Kinds of devices where ``torch.mm`` and ``torch.addmm`` have ``out_dtype`` (torch 2.13). The CPU has no such product:
fp32 factors take four times as long, and blocks that stay in the cache save nothing at 512 tokens and more."""


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which the host's operations have one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_host(device: torch.device) -> bool:
    """Whether the host computes itself. On any other device it starts operations and runs ahead of them."""
    return device.type == "cpu"


def module_of(device: torch.device) -> Any:
    """Returns torch's module for this kind of device, such as ``torch.cuda``; for devices that are not the host."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all work."""
    if not is_host(device):
        module_of(device).synchronize(device)


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the generator from which operations on the device draw by default."""
    return torch.default_generator if is_host(device) else module_of(device).default_generators[device.index or 0]


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores torch's generators at its end: the host's and the device's."""
    return torch.random.fork_rng([] if is_host(device) else [device], device_type=device.type)


def profiler_activities(device: torch.device) -> set[torch.profiler.ProfilerActivity]:
    """Returns what torch.profiler records: operators on the host, and kernels on the device."""
    activity = torch.profiler.ProfilerActivity
    return {activity.CPU, getattr(activity, device.type.upper())}
