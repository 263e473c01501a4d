"""The facts of a node, gathered by a process there, and what the facts of all nodes mean."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from experiments.base.hints import command
from launch import node_probe
from launch.diagnostics.finding import Finding, count_of, fault, ok, warning
from launch.diagnostics.probes import Host, Probes
from suite.cgroups import cpu_limit

PACKAGES = ["torch", "ray", "deepspeed", "transformers", "datasets", "wandb", "gpipe-suite"]

SOURCE_FOLDERS = ("suite", "models", "experiments", "launch")

LISTING_S = 20.0
"""Seconds for nvidia-smi: without persistence mode it first loads the driver, some seconds a GPU."""

ANSWER_S = 20.0
"""Seconds for a quick answer, such as a file written to a share."""

MIB = 2**20

SHARED_LEAST = 75 * MIB
"""Bytes of /dev/shm. Ray's object store is never smaller (OBJECT_STORE_MINIMUM_MEMORY_BYTES); the default of Docker and
Kubernetes is 64 MiB."""

SHARED_PER_PAIR = 9_637_888
"""Bytes that NCCL takes in /dev/shm for each ordered pair of GPUs of a node (from its messages in NVIDIA/nccl issues
342, 525 and 1518). In those reports 64 MiB were enough for two GPUs and not for four; eight need half a GiB."""

OPEN_FILES = 4096
"""A soft limit that Ray itself asks for (ray/_private/worker.py); each peer and each log takes a descriptor."""


@dataclass(frozen=True)
class NodeFacts:
    python: str
    versions: dict[str, str | None]
    """None if a package is not installed."""
    code: str
    """A digest of the suite's source files: two checkouts may have the same version."""
    cores: int
    """Cores that a process started by Ray may use."""
    gpus: int
    """As listed by the driver."""
    usable: int
    """GPUs that torch can use, including those hidden from this process; 0 if none is listed."""
    listing_error: str
    """Why the GPUs could not be listed; empty if they could, or if there is no driver."""
    shared: int
    """Bytes of /dev/shm."""
    shared_free: int
    open_files: int
    """The soft limit of the processes that Ray starts."""


def gather() -> NodeFacts:
    """Returns the facts of this machine."""
    gpus, listing_error = list_gpus()
    shared = shutil.disk_usage("/dev/shm")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return NodeFacts(
        python=platform.python_version(),
        versions=node_probe.installed_versions(PACKAGES),
        code=code_digest(),
        cores=cpu_limit(),
        gpus=gpus,
        usable=_usable_gpus() if gpus else 0,
        listing_error=listing_error,
        shared=shared.total,
        shared_free=shared.free,
        open_files=sys.maxsize if limit == resource.RLIM_INFINITY else limit,
    )


def code_digest() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCE_FOLDERS for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def list_gpus() -> tuple[int, str]:
    """Returns the number of GPUs, and why they could not be listed.

    Queries the driver: Ray hides GPUs from a process that requested none, and torch then sees none.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_S, check=True).stdout
        return sum(bool(line.strip()) for line in output.splitlines()), ""
    except FileNotFoundError:
        return 0, ""
    except subprocess.CalledProcessError as error:
        return 0, f"nvidia-smi: {(error.stdout + error.stderr).strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, f"nvidia-smi: {error}"


def _usable_gpus() -> int:
    """Returns how many GPUs torch can use in a process from which none is hidden."""
    hidden = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-c", "import torch; print(torch.cuda.is_available() * torch.cuda.device_count())"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=True).stdout
        return int(output.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


FactsByNode = Mapping[Host, NodeFacts]


def versions(known: FactsByNode) -> list[Finding]:
    """Checks that Python, packages and the suite's source are equal everywhere, and that packages match their pins."""
    pins = node_probe.pinned_versions()
    values_of: dict[str, dict[Host, str | None]] = {
        "Python": {node: facts.python for node, facts in known.items()},
        **{package: {node: facts.versions[package] for node, facts in known.items()} for package in PACKAGES},
        "the suite's code": {node: facts.code for node, facts in known.items()},
    }
    equal, found = [], []
    for what, values in values_of.items():
        version, pinned = next(iter(values.values())), pins.get(what)
        remedy = f"install the same {what} everywhere: by one image, or pip install with constraints.txt"
        if what == "the suite's code":
            remedy = f"use one commit on every node: by one image, one shared folder, or {command('submit')}"
        if missing := [node.name for node, value in values.items() if value is None]:
            found.append(fault("versions", f"{what} is not installed on {_join_names(missing)}", remedy))
        elif text := _differences(values):
            found.append(fault("versions", f"{what} differs: {text}", remedy))
        elif pinned and not node_probe.same_version(version, pinned):
            text = f"{what} {version} everywhere, but the suite is tested with {what}=={pinned}"
            found.append(warning("versions", text, f"on every node: pip install '{what}=={pinned}'"))
        else:
            equal.append(f"{what} {version}")
    return [*([ok("versions", ", ".join(equal))] if equal else []), *found]


def devices(known: FactsByNode) -> list[Finding]:
    """Checks the devices that Ray offers against those of the nodes."""
    found = [finding for node, facts in known.items() for finding in _offered_findings(node, facts)]
    kind = "GPU" if any(facts.gpus or node.gpus for node, facts in known.items()) else "core"
    counts = []
    for node, facts in known.items():
        own, offered = (facts.gpus, node.gpus) if kind == "GPU" else (facts.cores, node.cpus)
        counts.append(own if offered is None else offered)
    if not any(counts):
        remedy = "start nodes with ray start --num-cpus=, or use nodes with GPUs"
        return [*found, fault("devices", f"no node offers a {kind}", remedy)]
    return found or [ok("devices", f"{count_of(sum(counts), kind)} on {_nodes(sum(map(bool, counts)))}")]


def _offered_findings(node: Host, facts: NodeFacts) -> Iterable[Finding]:
    name, listed = node.name, facts.gpus
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


def limits(known: FactsByNode) -> list[Finding]:
    """Checks /dev/shm, which holds Ray's objects and NCCL's buffers between GPUs of one node, and open files."""
    found = []
    for node, facts in known.items():
        least = max(SHARED_LEAST, SHARED_PER_PAIR * facts.gpus * (facts.gpus - 1))
        text = f"{node.name}: /dev/shm has {_mib(facts.shared)}, of which {_mib(facts.shared_free)} are free"
        if facts.shared < least:
            why = f"NCCL between {facts.gpus} GPUs" if least > SHARED_LEAST else "Ray's object store"
            remedy = "start the container with --shm-size=1g or more (Kubernetes: an emptyDir with medium: Memory)"
            found.append(fault("shared memory", f"{text}; {why} needs {_mib(least)}", remedy))
        elif facts.shared_free < least:
            remedy = "delete files of ended processes in /dev/shm (nccl-*, torch_*)"
            found.append(fault("shared memory", f"{text}; {_mib(least)} are needed", remedy))
        if facts.open_files < OPEN_FILES:
            text = f"{node.name}: a process may open {facts.open_files} files; {OPEN_FILES} are needed"
            remedy = "ulimit -n 65536 before ray start (docker run --ulimit nofile=65536:65536)"
            found.append(warning("open files", text, remedy))
    files, free = (min(getattr(one, what) for one in known.values()) for what in ("open_files", "shared_free"))
    where = _nodes(len(known))
    return found or [
        ok("limits", f"/dev/shm has at least {_mib(free)} free, and {files:,} files may be open on {where}")
    ]


def storage(probes: Probes, nodes: Sequence[Host], folder: str) -> list[Finding]:
    """Checks that all nodes can write to a folder, and that each reads what the others wrote."""
    mark = f".doctor-{uuid4().hex[:12]}"
    markers = {node: f"{mark}-{at}" for at, node in enumerate(nodes)}
    remedy = "mount the shared folder there"
    answers, failed = probes.ask(nodes, node_probe.write_marker, lambda n: (folder, markers[n]), ANSWER_S)
    failed |= {node: why for node, why in answers.items() if why}
    writable = f"{remedy}, writable for this user"
    found = [fault("storage", f"{node.name} cannot write to {folder}: {why}", writable) for node, why in failed.items()]
    writers = [node for node in nodes if node not in failed]
    writer_of = {markers[node]: node.name for node in writers}
    question = (folder, list(writer_of), node_probe.SETTLE_S)
    answers, unread = probes.ask(writers, node_probe.unseen_markers, lambda n: question, ANSWER_S)
    found += [fault("storage", f"{node.name} cannot read from {folder}: {why}", remedy) for node, why in unread.items()]
    for node, unseen in answers.items():
        if unseen:
            whose = ", ".join(sorted(writer_of[marker] for marker in unseen))
            text = f"{node.name} does not see in {folder} what {whose} wrote"
            found.append(fault("storage", text, "STORAGE must be one folder that all nodes share"))
    probes.ask(writers, node_probe.remove_markers, lambda n: (folder, list(markers.values())), ANSWER_S)
    who = "this node writes and reads" if len(nodes) == 1 else f"{len(nodes)} nodes write, and each reads the others'"
    return found or [ok("storage", f"{folder}: {who}")]


def _differences(values: Mapping[Host, object]) -> str:
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


def _mib(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if size < 1024 * MIB else f"{size / MIB / 1024:.1f} GiB"
