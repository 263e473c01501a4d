"""The peak bytes of a stage's tensors in a step."""

from __future__ import annotations

import gc

from launch.worker.measure import MeasuredPipeline, join, run_steps
from suite.pipeline.planning.memory_tracker import tracked_memory

MOST_WORKSPACES = 256 << 20
"""cuBLAS's of a forward and a backward took 66 MiB on an H200. More would be tensors that something still holds."""


def measure_peak_bytes(rank: int, world: int, rendezvous: str, pipeline: MeasuredPipeline) -> int:
    """Measures the peak bytes of one worker's tensors, from its first weight to the end of the second step."""
    device = join(rank, world, rendezvous, pipeline)
    with tracked_memory(device) as memory:
        run_steps(device, pipeline, 0)
        gc.collect()
    workspaces = memory.change  # of libraries, which a plan counts as a part of the process
    assert workspaces <= MOST_WORKSPACES, f"{workspaces / 2**20:.0f} MiB of tensors are left after the steps"
    return memory.peak - workspaces
