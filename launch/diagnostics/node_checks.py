"""Interprets the facts of all nodes. Plain functions: facts in, findings out."""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement

from experiments.base.hints import command
from launch.diagnostics.finding import Finding, count_of, fault, ok, warning
from launch.diagnostics.node_facts import PACKAGES, NodeFacts
from launch.diagnostics.probes import Node
from launch.node_probe import same_version
from suite.pipeline.planning.devices import GIB

MIB = 2**20

FactsByNode = Mapping[Node, NodeFacts]

SHARED_LEAST = 75 * MIB
"""Bytes of /dev/shm. Ray's object store is never smaller (OBJECT_STORE_MINIMUM_MEMORY_BYTES); the default of Docker and
Kubernetes is 64 MiB."""

SHARED_PER_PAIR = 9_637_888
"""Bytes that NCCL takes in /dev/shm for each ordered pair of GPUs of a node (from its messages in NVIDIA/nccl issues
342, 525 and 1518). In those reports 64 MiB were enough for two GPUs and not for four; eight need half a GiB."""

SHARED_CAP = 10 * 10**9
"""Ray takes 30% of the memory for its objects, and more than this cap only if /dev/shm has room; with less than both
it puts objects on disk."""

DISK_LEAST, DISK_GOOD = GIB, 10 * GIB
"""Bytes. A run at laptop scale writes some hundred MiB of checkpoints, of which two are kept while a third is written;
a run with six billion parameters needs far more than either, and its plan says how much."""

RAY_FULL = 0.95
"""The used share of the disk above which Ray stores no more objects (local_fs_capacity_threshold)."""


def versions(known: FactsByNode) -> list[Finding]:
    """Checks that Python, packages and the suite's source are equal everywhere, and that packages match their pins."""
    pins = _pinned()
    values_of: dict[str, dict[Node, str | None]] = {
        "Python": {node: facts.python for node, facts in known.items()},
        **{package: {node: facts.versions[package] for node, facts in known.items()} for package in PACKAGES},
        "the suite's code": {node: facts.code for node, facts in known.items()},
    }
    equal, found = [], []
    for what, values in values_of.items():
        version, pinned = next(iter(values.values())), pins.get(what)
        if missing := [node.name for node, value in values.items() if value is None]:
            found.append(fault("versions", f"{what} is not installed on {_join_names(missing)}", _remedy(what)))
        elif text := _differences(values):
            found.append(fault("versions", f"{what} differs: {text}", _remedy(what)))
        elif pinned and not same_version(version, pinned):
            text = f"{what} {version} everywhere, but the suite is tested with {what}=={pinned}"
            remedy = f"pip install --constraint constraints.txt '{what}=={pinned}' on every node"
            found.append(warning("versions", text, remedy))
        else:
            equal.append(f"{what} {version}")
    return [*([ok("versions", ", ".join(equal))] if equal else []), *found]


def _pinned() -> dict[str, str]:
    """Returns the versions of the suite's direct dependencies that are pinned."""
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("gpipe-suite") or []]
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {
        requirement.name: specifier.version
        for requirement in requirements
        for specifier in requirement.specifier
        if specifier.operator == "==" and requirement.marker is None  # no extra
    }


def _remedy(what: str) -> str:
    if what == "the suite's code":
        submit = command("submit")
        return f"use one commit on every node: by one image, one shared folder, or {submit}, which packs the files"
    return f"install the same {what} everywhere: by one image, or pip install with constraints.txt"


def devices(known: FactsByNode) -> list[Finding]:
    """Checks the devices that Ray offers against those of the nodes, and whether the nodes are alike."""
    found = [finding for node, facts in known.items() for finding in _offered_findings(node, facts)]
    gpus = any(facts.gpus or node.gpus for node, facts in known.items())
    kind = "GPU" if gpus else "core"

    def count(node: Node, facts: NodeFacts) -> int:
        if node.cpus is None:
            return len(facts.gpus) if gpus else facts.cores
        return (node.gpus if gpus else node.cpus) or 0

    counts = {node: count(node, facts) for node, facts in known.items()}
    workers = {node: some for node, some in counts.items() if some}
    if not workers:
        remedy = "start nodes with ray start --num-cpus=, or use nodes with GPUs"
        return [*found, fault("devices", f"no node offers a {kind}", remedy)]
    if text := _differences(workers):
        remedy = "find the missing ones, or choose K for the smallest node"
        found.append(warning("devices", f"unequal {kind}s: {text}", remedy))
    gpu_names = {node: {gpu.name for gpu in known[node].gpus} for node in workers}
    drivers = {node: {gpu.driver for gpu in known[node].gpus} for node in workers}
    remedies = "plans count all as the slowest (docs/planning.md)", "use one driver"
    for what, values, remedy in zip(("names", "drivers"), (gpu_names, drivers), remedies, strict=True):
        if text := _differences({node: ", ".join(sorted(some)) or "none" for node, some in values.items()}):
            found.append(warning("devices", f"GPUs of different {what}: {text}", remedy))
    if found:
        return found
    memory = min(facts.memory for facts in known.values())
    names = sorted({gpu.name for facts in known.values() for gpu in facts.gpus})
    each = f"{', '.join(names)}, driver {next(g.driver for f in known.values() for g in f.gpus)}; " if names else ""
    offered = f"{count_of(sum(workers.values()), kind)} on {_nodes(len(workers))}"
    return [ok("devices", f"{offered}; {each}at least {_gib(memory)} of memory a node")]


def _offered_findings(node: Node, facts: NodeFacts) -> Iterable[Finding]:
    name, listed = node.name, len(facts.gpus)
    if facts.listing_error:
        remedy = "repair the driver (nvidia-smi must list every GPU), then restart the node"
        yield fault("devices", f"{name}: its GPUs cannot be listed: {facts.listing_error}", remedy)
    elif listed != facts.usable:
        text = f"{name}: nvidia-smi lists {listed} GPUs, torch {facts.versions['torch']} can use {facts.usable}"
        yield fault("devices", text, "install a torch build for CUDA and a recent driver")
    if node.gpus is not None and node.gpus > listed and not facts.listing_error:
        remedy = "a GPU has failed (see dmesg), or --num-gpus is too high: restart the node"
        yield fault("devices", f"{name}: Ray offers {node.gpus} GPUs, but there are {listed}", remedy)
    if node.gpus is not None and node.gpus < listed:
        remedy = "start the node with --num-gpus, and without CUDA_VISIBLE_DEVICES"
        yield warning("devices", f"{name}: there are {listed} GPUs, but Ray offers {node.gpus}", remedy)
    if node.cpus is not None and node.cpus > facts.cores:
        text = f"{name}: Ray offers {node.cpus} CPUs, but its processes may use {count_of(facts.cores, 'core')}"
        remedy = "workers would share cores: start the node with a lower --num-cpus, or more cores"
        yield warning("devices", text, remedy)


def shared_memory(known: FactsByNode) -> list[Finding]:
    """Checks /dev/shm, which holds Ray's objects and NCCL's buffers between GPUs of one node."""
    found = []
    for node, facts in known.items():
        size, free, gpus = facts.shared.size, facts.shared.free, len(facts.gpus)
        least = max(SHARED_LEAST, SHARED_PER_PAIR * gpus * (gpus - 1))
        text = f"{node.name}: /dev/shm has {_mib(size)}, of which {_mib(free)} are free"
        larger = "start the container with --shm-size=1g or more (Kubernetes: an emptyDir with medium: Memory there)"
        if size < least:
            why = f"NCCL between {gpus} GPUs" if least > SHARED_LEAST else "Ray's object store"
            found.append(fault("shared memory", f"{text}; {why} needs {_mib(least)}", larger))
        elif free < least:
            remedy = "delete files of ended processes in /dev/shm (nccl-*, torch_*)"
            found.append(fault("shared memory", f"{text}; {_mib(least)} are needed", remedy))
        elif size < min(0.3 * facts.memory, SHARED_CAP) and node.id:
            text += f"; below 30% of the node's {_gib(facts.memory)} Ray puts objects on disk"
            found.append(warning("shared memory", text, larger))
    least_free = min((facts.shared.free for facts in known.values()), default=0)
    return found or [ok("shared memory", f"/dev/shm has at least {_mib(least_free)} free on {_nodes(len(known))}")]


def disk(known: FactsByNode, temporary: str) -> list[Finding]:
    """Checks the free space for runs and for Ray, whose folder is ``temporary``."""
    found = []
    for node, facts in known.items():
        for folder in facts.folders:
            text = f"{node.name}: {folder.path} has {_gib(folder.free)} free of {_gib(folder.size)}"
            if folder.free < DISK_LEAST:
                found.append(fault("disk", text, f"free space: no run fits in less than {_gib(DISK_LEAST)}"))
            elif folder.path == temporary and folder.free < (1 - RAY_FULL) * folder.size:
                text += f": above {RAY_FULL:.0%} use Ray stores no more objects there"
                found.append(warning("disk", text, "free space, or start the node with --temp-dir on another disk"))
            elif folder.path != temporary and folder.free < DISK_GOOD:
                found.append(warning("disk", text, "free space: checkpoints of a large model will not fit"))
    folders = [folder for facts in known.values() for folder in facts.folders]
    if found or not folders:
        return found
    fewest, paths = min(folder.free for folder in folders), sorted({folder.path for folder in folders})
    return [ok("disk", f"at least {_gib(fewest)} free in {_join_names(paths)} on {_nodes(len(known))}")]


def _differences(values: Mapping[Node, object]) -> str:
    """Returns which nodes have which value, the most frequent one first; an empty text if all have the same."""
    where: defaultdict[object, list[str]] = defaultdict(list)
    for node, value in values.items():
        where[value].append(node.name)
    if len(where) == 1:
        return ""
    by_count = sorted(where.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{value} on {_join_names(names)}" for value, names in by_count)


def _join_names(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _nodes(count: int) -> str:
    return "this machine" if count == 1 else f"{count} nodes"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _mib(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if size < GIB else _gib(size)
