"""The bytes of tensors that stand at once, as torch's own allocator counts them: on a GPU, and on the CPU alike."""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType
from typing import Any

import torch

_MEMORY = "[memory]"

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST_THRESHOLD = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Has the C library keep memory that was freed, for the next tensor, where it would give it back at once.

    By default glibc maps each large tensor anew, and its pages are then filled with zeros, fault by fault, in every
    action of every step: a tenth to a quarter of the time of a convolution's backward (measured). Does nothing where
    there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class Allocation:
    """A context that counts what is allocated and freed inside it. One at a time.

    ``peak``
        most bytes alive at once, over what stood at its begin;
    ``change``
        bytes alive at its end, over what stood at its begin; negative where more was freed.

    On the CPU torch knows the size of what is freed only if it was made inside an ``Allocation``, this or an earlier
    one; of what was made outside, nothing should be freed inside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self._profile: Any = None
        self.peak = self.change = 0

    def __enter__(self) -> Allocation:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
            self.change = torch.cuda.memory_allocated(self._device) - self._before
            return
        self._profile.__exit__(kind, error, trace)
        events = [e for e in self._profile.kineto_results.events() if e.name() == _MEMORY]
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.change += event.nbytes()
            self.peak = max(self.peak, self.change)
