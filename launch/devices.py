"""What this machine has to compute with."""

from __future__ import annotations

import os

from experiments.cluster import Cluster


def cores() -> int:
    """Returns the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine() -> Cluster:
    """Returns the GPUs of this machine, or where it has none its cores with an equal share of its memory each."""
    import torch

    if torch.cuda.is_available():
        return gpus()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Cluster(cores(), memory // cores(), "cpu")


def gpus() -> Cluster:
    """Returns the GPUs that this process sees: their number, the bytes of the smallest, their name."""
    import torch

    count = torch.cuda.device_count()
    smallest = min(torch.cuda.get_device_properties(at).total_memory for at in range(count))
    return Cluster(count, smallest, "gpu", name=torch.cuda.get_device_name(0))
