"""What facts of all nodes mean. Plain functions: facts in, findings out."""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement

from launch.doctor.facts import PACKAGES, Facts, Folder
from launch.doctor.finding import Finding, fault, ok, warning
from launch.doctor.nodes import Node

MIB, GIB = 2**20, 2**30

Known = Mapping[Node, Facts]

SHARED_LEAST = 75 * MIB
"""Bytes of /dev/shm. Ray's object store is never smaller (OBJECT_STORE_MINIMUM_MEMORY_BYTES); Docker and Kubernetes
give 64 MiB unless told otherwise."""

SHARED_PER_PAIR = 9_637_888
"""Bytes that NCCL takes in /dev/shm for each ordered pair of GPUs of a node (as in its own messages: NVIDIA/nccl issues
342, 525, 1518). 64 MiB held two GPUs in those reports and not four; eight need half a GiB."""

SHARED_CAP = 10 * 10**9
"""Ray takes 30% of the memory for its objects, and more than this only where /dev/shm has it: below the lesser of both
they go to the disk."""

DISK_LEAST, DISK_GOOD = GIB, 10 * GIB
"""Bytes. A run of the laptop scale writes some hundred MiB of checkpoints, of which two are kept while a third is
written; one of six billion parameters needs far more than either, and its plan says how much."""

RAY_FULL = 0.95
"""The share of its disk that Ray lets be used: past it no object is put there (local_fs_capacity_threshold)."""


def versions(known: Known) -> list[Finding]:
    """Python, packages and our own source: the same everywhere, and those that were pinned."""
    found = [_equal("Python", {node: facts.python for node, facts in known.items()})]
    pinned = _pinned()
    for package in PACKAGES:
        those: dict[Node, str | None] = {node: facts.versions[package] for node, facts in known.items()}
        missing = [node.name for node, version in those.items() if version is None]
        if missing:
            found.append(fault("versions", f"{package} is not installed on {_all(missing)}", _same(package)))
            continue
        one = _equal(package, those)
        wanted = pinned.get(package)
        version = next(iter(those.values()))
        if one.level == "ok" and wanted and version and not Requirement(wanted).specifier.contains(version, True):
            one = warning(
                "versions", f"{package} {version} everywhere, {wanted} is what the suite is tested with",
                f"pip install --constraint constraints.txt '{wanted}' on every node",
            )  # fmt: skip
        found.append(one)
    found.append(_equal("the suite's code", {node: facts.code for node, facts in known.items()}))
    return _joined("versions", found)


def _pinned() -> dict[str, str]:
    try:
        lines = importlib.metadata.requires("gpipe-suite") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in lines if "extra ==" not in line]
    return {one.name: f"{one.name}{one.specifier}" for one in wanted if str(one.specifier).startswith("==")}


def _equal(what: str, values: Mapping[Node, object]) -> Finding:
    where = _by_value(values)
    if len(where) == 1:
        return ok("versions", f"{what} {next(iter(where))}")
    told = ", ".join(f"{value} on {_all(names)}" for value, names in where.items())
    return fault("versions", f"{what} differs: {told}", _same(what))


def _same(what: str) -> str:
    if what == "the suite's code":
        return "bring one commit to every node: one image, one shared folder, or make submit, which packs the files"
    return f"install one {what} everywhere: one image, or pip install with constraints.txt"


def devices(known: Known) -> list[Finding]:
    """What Ray may give away against what is there, and whether the nodes are alike."""
    found = [finding for node, facts in known.items() for finding in _offered(node, facts)]
    gpus = any(facts.gpus or node.gpus for node, facts in known.items())
    kind = "GPU" if gpus else "core"

    def count(node: Node, facts: Facts) -> int:
        return (node.gpus if gpus else node.cpus) or 0 if node.cpus is not None else (
            len(facts.gpus) if gpus else facts.cores
        )  # fmt: skip

    counts = {node: count(node, facts) for node, facts in known.items()}
    workers = {node: some for node, some in counts.items() if some}
    if not workers:
        return [*found, fault("devices", f"no node offers a {kind}", "start nodes with ray start --num-cpus=, or GPUs")]
    where = _by_value(workers)
    if len(where) > 1:
        told = ", ".join(f"{some} on {_all(names)}" for some, names in where.items())
        found.append(
            warning("devices", f"unequal: {kind}s: {told}", "find the missing ones, or plan K by the smallest node")
        )
    for what in ("name", "driver"):
        seen = _by_value({node: ", ".join(sorted({getattr(g, what) for g in known[node].gpus})) for node in workers})
        if gpus and len(seen) > 1:
            told = ", ".join(f"{value or 'none'} on {_all(names)}" for value, names in seen.items())
            found.append(
                warning("devices", f"GPUs of different {what}s: {told}",
                        "a pipeline is as fast as its slowest stage: use nodes of one kind and one driver"),
            )  # fmt: skip
    if not found:
        memory = min(facts.memory for facts in known.values())
        names = sorted({gpu.name for facts in known.values() for gpu in facts.gpus})
        each = f"{', '.join(names)}, driver {next(g.driver for f in known.values() for g in f.gpus)}; " if names else ""
        total = sum(workers.values())
        found = [ok("devices", f"{total} {kind}{'s' * (total > 1)} on {_nodes(len(workers))}; {each}at least "
                    f"{_gib(memory)} of memory a node")]  # fmt: skip
    return found


def _offered(node: Node, facts: Facts) -> Iterable[Finding]:
    there = len(facts.gpus)
    if facts.listing:
        yield fault("devices", f"{node.name}: its GPUs cannot be listed: {facts.listing}",
                    "mend the driver (nvidia-smi must list every GPU), then start the node again")  # fmt: skip
    elif there != facts.usable:
        yield fault("devices", f"{node.name}: {there} GPUs are listed, torch {facts.versions['torch']} can use "
                    f"{facts.usable}", "install a torch built for CUDA, and a driver new enough")  # fmt: skip
    if node.gpus is not None and node.gpus > there and not facts.listing:
        yield fault("devices", f"{node.name}: Ray offers {node.gpus} GPUs, {there} are there",
                    "a GPU has fallen out (dmesg tells), or --num-gpus is too high: start the node again")  # fmt: skip
    if node.gpus is not None and node.gpus < there:
        yield warning("devices", f"{node.name}: {there} GPUs are there, Ray offers {node.gpus}",
                      "start the node with --num-gpus, and without CUDA_VISIBLE_DEVICES")  # fmt: skip
    if node.cpus is not None and node.cpus > facts.cores:
        yield warning("devices", f"{node.name}: Ray offers {node.cpus} CPUs, its processes may use "
                      f"{_count(facts.cores, 'core')}",
                      "workers would take turns: start the node with fewer --num-cpus, or more cores")  # fmt: skip


def shared_memory(known: Known) -> list[Finding]:
    """/dev/shm, where Ray keeps its objects and NCCL what GPUs of one node exchange."""
    found = []
    for node, facts in known.items():
        size, free, gpus = facts.shared.size, facts.shared.free, len(facts.gpus)
        least = max(SHARED_LEAST, SHARED_PER_PAIR * gpus * (gpus - 1))
        told = f"{node.name}: /dev/shm has {_mib(size)}, of which {_mib(free)} are free"
        larger = "start the container with --shm-size=1g or more (Kubernetes: an emptyDir with medium: Memory there)"
        if size < least:
            why = f"NCCL between {gpus} GPUs" if least > SHARED_LEAST else "Ray's object store"
            found.append(fault("shared memory", f"{told}; {why} needs {_mib(least)}", larger))
        elif free < least:
            found.append(
                fault("shared memory", f"{told}; {_mib(least)} are needed",
                      "delete what ended processes left in /dev/shm (nccl-*, torch_*)")
            )  # fmt: skip
        elif size < min(0.3 * facts.memory, SHARED_CAP) and node.id:
            found.append(
                warning("shared memory", f"{told}; below 30% of the node's {_gib(facts.memory)} Ray keeps its objects "
                        "on the disk", larger)
            )  # fmt: skip
    least_free = min((facts.shared.free for facts in known.values()), default=0)
    return found or [ok("shared memory", f"/dev/shm has at least {_mib(least_free)} free on {_nodes(len(known))}")]


def disk(known: Known, temporary: str) -> list[Finding]:
    """Room where runs are written and where Ray writes; ``temporary`` is Ray's folder."""
    found, fewest = [], None
    for node, facts in known.items():
        for folder in facts.folders:
            told = f"{node.name}: {folder.path} has {_gib(folder.free)} free of {_gib(folder.size)}"
            if folder.free < DISK_LEAST:
                found.append(fault("disk", told, f"make room: less than {_gib(DISK_LEAST)} holds no run"))
            elif folder.path == temporary and _used(folder) > RAY_FULL:
                found.append(
                    warning("disk", f"{told}: more than {RAY_FULL:.0%} are used, and Ray stores no more objects there",
                            "make room, or start the node with --temp-dir on another disk")
                )  # fmt: skip
            elif folder.path != temporary and folder.free < DISK_GOOD:
                found.append(warning("disk", told, "make room: checkpoints of a large model will not fit"))
            fewest = folder.free if fewest is None else min(fewest, folder.free)
    if not found and fewest is not None:
        paths = sorted({folder.path for facts in known.values() for folder in facts.folders})
        return [ok("disk", f"at least {_gib(fewest)} free in {_all(paths)} on {_nodes(len(known))}")]
    return found


def _used(folder: Folder) -> float:
    return 1 - folder.free / folder.size if folder.size else 1.0


def _by_value(values: Mapping[Node, object]) -> dict[object, list[str]]:
    where: defaultdict[object, list[str]] = defaultdict(list)
    for node, value in values.items():
        where[value].append(node.name)
    return dict(sorted(where.items(), key=lambda item: -len(item[1])))


def _joined(subject: str, found: list[Finding]) -> list[Finding]:
    """Returns one line for all that is well, before those that are not."""
    well = [one.found for one in found if one.level == "ok"]
    return [*([ok(subject, ", ".join(well))] if well else []), *(one for one in found if one.level != "ok")]


def _all(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _nodes(count: int) -> str:
    return "this machine" if count == 1 else f"{count} nodes"


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _mib(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if size < GIB else _gib(size)
