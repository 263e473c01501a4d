"""CPU and memory limits of this process: containers and schedulers set them with Linux control groups.

A group's limits apply to all groups below it, so the smallest limit on the path to the root counts. Version 2 has one
hierarchy; in version 1 each resource has its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TREE, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_limit(tree: Path = TREE, own: Path = OWN) -> int:
    """Returns the number of cores this process may use: its CPU affinity, limited by its CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [float(affinity)]
    for group in _groups("cpu", tree, own):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = _numbers(group / "cpu.max") or [number for name in names for number in _numbers(group / name)]
        if len(quota) == 2 and quota[0] > 0:
            limits.append(quota[0] / quota[1])
    return max(1, int(min(limits)))


def memory_limit_bytes(tree: Path = TREE, own: Path = OWN) -> int:
    """Returns the bytes of memory that the processes of this process's group may use together."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory", tree, own):
        sizes += _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
    return min(sizes)


def _groups(controller: str, tree: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of this process's groups that may limit a resource, each followed by its parents.

    In a container a group may have its path on the host, while the tree starts at the container's own group. Such
    folders do not exist and have no limits; the tree's root is always included.
    """
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            roots = [tree / controller, tree / controllers] if controllers else [tree]
            group = Path(path.lstrip("/"))
            yield from (root / part for root in roots for part in (group, *group.parents))


def _numbers(file: Path) -> list[int]:
    """Returns the numbers in a group's file; none if the file is missing or contains ``max``."""
    try:
        words = file.read_text().split()
        return [int(word) for word in words] if "max" not in words else []
    except (OSError, ValueError):
        return []
