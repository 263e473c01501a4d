"""The environment of a process that uses a GPU, set before its first use of one."""

from __future__ import annotations

import os

from suite.errors import SettingError

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The variable with the number of a GPU's hardware queues, which its streams share."""

MOST_QUEUES = 32
"""CUDA's maximum."""

_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch reads one of them."""

MODULE_LOADING = "CUDA_MODULE_LOADING"
"""The variable that says when CUDA loads kernels."""


def gpu_environment() -> dict[str, str]:
    """Returns the variables that the user has not set.

    All kernels are loaded at the start, because one that is loaded at its first launch may wait for a receive that
    waits for it. Each stream gets a hardware queue. ``expandable_segments`` lets torch's allocator grow a segment
    instead of starting another: packed text has about a dozen shapes, and fixed segments for each would leave gaps.
    A worker compiles its few functions itself (``suite.device.fused``): other processes would take longer to start.
    """
    chosen = {MODULE_LOADING: "EAGER", QUEUES: str(MOST_QUEUES), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if not any(name in os.environ for name in _ALLOCATOR_NAMES):
        chosen["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {name: value for name, value in chosen.items() if name not in os.environ}


def check_module_loading(virtual_stages: int) -> None:
    """Raises SettingError when kernels are loaded lazily on stages of several cells: the receives of one cell are
    posted before another one runs. One cell per stage stops in no case (``suite.pipeline.schedule.play``)."""
    loading = os.environ.get(MODULE_LOADING, "EAGER")
    if virtual_stages > 1 and loading != "EAGER":
        raise SettingError(
            f"{MODULE_LOADING} is {loading}, and a stage of this run has {virtual_stages} cells: a kernel that is "
            "loaded at its first launch may wait for a receive that waits for that kernel; unset it"
        )


def check_queues(links: int, tie_groups: int) -> None:
    """Raises SettingError when a stage has more streams than its GPU has hardware queues: behind a message that waits,
    computation in the same queue would wait too. The stage exchanges messages over ``links`` pairs of cells, and shares
    parameters with the stages of ``tie_groups`` groups."""
    collectives = 2 + tie_groups  # of all workers, of a stage's replicas
    streams, queues = 1 + 2 * links + collectives, os.environ.get(QUEUES, str(MOST_QUEUES))
    if not links or (queues.isdecimal() and streams <= int(queues) <= MOST_QUEUES):
        return
    if streams > MOST_QUEUES:
        raise SettingError(
            f"a stage of this run has {streams} CUDA streams, two for each of its {links} links to other cells, and a "
            f"GPU has {MOST_QUEUES} hardware queues for them at most; use fewer cells per stage "
            "(pipeline.virtual_stages) or fewer skips between stages"
        )
    raise SettingError(
        f"{QUEUES} is {queues}, and a stage of this run has {streams} CUDA streams: computation would wait behind "
        f"messages that wait for another stage; unset it, or set it to {streams} to {MOST_QUEUES}"
    )
