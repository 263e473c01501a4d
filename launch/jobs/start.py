"""What a job runs first, on the cluster: checks the versions of all nodes, says what is free, and becomes the command.

It imports no package but Ray, because the others may be missing.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from launch.node_probe import installed_versions, pinned_versions, same_version
from launch.ray_nodes import alive_nodes, collect, start_on

ANSWER_S = 60.0
"""Seconds for all nodes to answer; loading Python from a cold disk takes most of them."""

NODE_LINE = "node: "
"""Begins the line that says where a job's driver runs; ``make submit`` finds it in the job's log."""

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod finds the name of its namespace."""


def main(arguments: list[str]) -> None:
    """Checks the cluster and replaces this process by ``gpipe`` with these arguments. Exits with one sentence and code
    2 for what would make a run fail. The doctor reports such faults itself."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    print(f"{NODE_LINE}{_node()}", flush=True)
    if fault := _find_storage() or (_wrong_versions() if arguments[0] != "doctor" else ""):
        print(f"error: {fault}", flush=True)
        sys.exit(2)
    print(f"storage: {os.environ['GPIPE_STORAGE']}\n{_free_devices()}", flush=True)
    ray.shutdown()
    os.execv(sys.executable, [sys.executable, "-m", "launch.cli", *arguments])


def _node() -> str:
    """Returns the host and what reaches it: its address, or its namespace if it is a pod."""
    import ray

    if NAMESPACE.exists():
        return f"{socket.gethostname()} (namespace {NAMESPACE.read_text().strip()})"
    return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"  # type: ignore[no-untyped-call]


def _find_storage() -> str:
    """Sets GPIPE_STORAGE where neither the job nor the node has it: a single node's folder that outlives the job.
    Returns why there is none."""
    storage = os.environ.get("GPIPE_STORAGE", "")
    if not storage and (count := len(alive_nodes())) > 1:
        return (
            f"the cluster has {count} nodes, and a run needs storage shared by all of them: give --storage, or set "
            "GPIPE_STORAGE on its nodes"
        )
    os.environ["GPIPE_STORAGE"] = storage = storage or str(Path.home() / "gpipe-storage")
    try:
        Path(storage).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=storage):
            pass
    except OSError as error:
        return f"the head cannot write to storage {storage}: {error.strerror}"
    return ""


def _wrong_versions() -> str:
    """Returns which nodes have which wrong versions, and how to install the right ones; empty if all are right."""
    pins, nodes = pinned_versions(), {node["NodeID"]: node["NodeManagerHostname"] for node in alive_nodes()}
    found, silent = collect({id: start_on(id, installed_versions, list(pins)) for id in nodes}, ANSWER_S)
    for id, why in silent.items():
        return f"node {nodes[id]} does not say which packages it has: {why}; repair it, or remove it"
    wrong: defaultdict[tuple[str, str | None], list[str]] = defaultdict(list)
    for id, versions in found.items():
        for name, version in versions.items():
            if not same_version(version, pins[name]):
                wrong[name, version].append(nodes[id])
    if not wrong:
        print(f"all {len(pins)} pinned packages are installed on {len(nodes)} node{'s' * (len(nodes) > 1)}", flush=True)
        return ""
    where = [(f"{name} {version or 'missing'}", sorted(hosts)) for (name, version), hosts in wrong.items()]
    differ = [f"{what} on {', '.join(hosts)}" for what, hosts in sorted(where)]
    packages = " ".join(sorted({f"{name}=={pins[name]}" for name, _ in wrong}))
    return f"{', '.join(differ)}; on each node, or in its image: pip install {packages}"


def _free_devices() -> str:
    import ray

    offered: dict[str, Any] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    kind = "GPU" if offered.get("GPU") else "CPU"
    free = ray.available_resources().get(kind, 0)  # type: ignore[no-untyped-call]
    return f"devices: {free:.0f} of {offered.get(kind, 0):.0f} {kind}s are free"


if __name__ == "__main__":
    main(sys.argv[1:])
