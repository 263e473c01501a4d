"""What this process may take of its machine: a container or a scheduler leaves it a part, by Linux's control groups.

A group's limits hold for all groups below it, so the least of those on the way up counts. Version 2 has one tree; in
version 1 each resource has its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TREE, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores(tree: Path = TREE, own: Path = OWN) -> int:
    """Returns the cores this process may use: those it is bound to, and no more than its time is enough for."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [float(bound)]
    for group in _groups("cpu", tree, own):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        found = _numbers(group / "cpu.max") or [number for name in names for number in _numbers(group / name)]
        if len(found) == 2 and found[0] > 0:
            shares.append(found[0] / found[1])
    return max(1, int(min(shares)))


def memory(tree: Path = TREE, own: Path = OWN) -> int:
    """Returns the bytes of memory this process may use, with all others of its group."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory", tree, own):
        sizes += _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
    return min(sizes)


def _groups(controller: str, tree: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of this process's groups that could limit a resource, each with those above it.

    In a container a group may be named as the host knows it, while the tree begins with the container's own: what is
    not there is passed over, the tree's top never.
    """
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            tops = [tree / controller, tree / controllers] if controllers else [tree]
            place = Path(path.lstrip("/"))
            yield from (top / part for top in tops for part in (place, *place.parents))


def _numbers(file: Path) -> list[int]:
    """Returns the numbers of a group's file; none where there is none, or it says ``max``."""
    try:
        words = file.read_text().split()
        return [int(word) for word in words] if "max" not in words else []
    except (OSError, ValueError):
        return []
