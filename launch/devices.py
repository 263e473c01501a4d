"""What this machine has to compute with."""

from __future__ import annotations

from experiments.cluster import Cluster
from launch.limits import cores, memory


def this_machine() -> Cluster:
    """Returns the GPUs of this machine, or where it has none its cores with an equal share of its memory each."""
    import torch

    if torch.cuda.is_available():
        return gpus()
    return Cluster(cores(), memory() // cores(), "cpu")


def gpus() -> Cluster:
    """Returns the GPUs that this process sees: their number, the bytes of the smallest, their name."""
    import torch

    count = torch.cuda.device_count()
    smallest = min(torch.cuda.get_device_properties(at).total_memory for at in range(count))
    return Cluster(count, smallest, "gpu", name=torch.cuda.get_device_name(0))
