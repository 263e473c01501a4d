"""Measures the peak bytes of tensors as torch's allocator counts them, on a GPU or on the CPU."""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType
from typing import Any

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


class MemoryTracker:
    """A context that counts allocated and freed bytes. Only one may be active.

    ``peak``
        peak of live bytes, relative to its start;
    ``change``
        live bytes at its end, relative to its start; negative if more was freed.

    On the CPU torch knows the size of freed memory only if it was allocated inside a ``MemoryTracker``, this or an
    earlier one. Do not free other tensors inside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self._profile: Any = None
        self.peak = self.change = 0

    def __enter__(self) -> MemoryTracker:
        if is_host(self._device):
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        else:
            synchronize(self._device)
            module_of(self._device).reset_peak_memory_stats(self._device)
            self._before = module_of(self._device).memory_allocated(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_host(self._device):
            synchronize(self._device)
            self.peak = module_of(self._device).max_memory_allocated(self._device) - self._before
            self.change = module_of(self._device).memory_allocated(self._device) - self._before
            return
        self._profile.__exit__(kind, error, trace)
        events = [e for e in self._profile.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.change += event.nbytes()
            self.peak = max(self.peak, self.change)
