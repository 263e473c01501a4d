"""Measures the peak bytes of tensors as torch's allocator counts them, on a GPU or on the CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from suite.device import is_host, module_of, synchronize

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST_THRESHOLD = 32 << 20  # glibc's maximum


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory for the next tensor instead of returning it to the system.

    By default glibc maps each large tensor anew, and the kernel zeroes its pages, fault by fault, in every action of
    every step: a tenth to a quarter of the time of a convolution's backward (measured). Does nothing without glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@dataclass
class MemoryUse:
    """What a context of ``tracked_memory`` allocated and freed, in bytes; known at its end."""

    peak: int = 0
    """Peak of live bytes, relative to its start."""
    change: int = 0
    """Live bytes at its end, relative to its start; negative if more was freed."""


@contextmanager
def tracked_memory(device: torch.device) -> Iterator[MemoryUse]:
    """A context that counts allocated and freed bytes. Only one may be active.

    On the CPU torch knows the size of freed memory only if it was allocated inside such a context, this or an earlier
    one. Do not free other tensors inside.
    """
    use = MemoryUse()
    if is_host(device):
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            yield use
        events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            use.change += event.nbytes()
            use.peak = max(use.peak, use.change)
        return
    synchronize(device)
    module_of(device).reset_peak_memory_stats(device)
    before = module_of(device).memory_allocated(device)
    yield use
    synchronize(device)
    use.peak = module_of(device).max_memory_allocated(device) - before
    use.change = module_of(device).memory_allocated(device) - before
