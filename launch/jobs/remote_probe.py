"""Runs on a cluster before anything is uploaded, with the cluster's own Python; so it imports nothing of this project.

driver, on the head   writes a marker into the storage ------------> every node reads it, and writes one of its own
driver                reads every node's marker  <-----------------
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import logging
import os
import platform
import socket
import sys
import time
import uuid
from typing import Any

MARK = "@gpipe-probe "
MISSING = "there is no such folder; mount the share there, or make the folder"
NODE_S = 120.0
"""Seconds for all nodes to answer, however busy."""

RETRY_S = 20.0
"""Seconds after which a node that has not answered is probed again, by another process."""

EQUAL_ERRORS = 3
"""Equal errors of a node in a row after which it is not probed again."""


def find_differences(pins: dict[str, str]) -> dict[str, str | None]:
    """Returns package -> installed version or None for each that is not as pinned. Ignores suffixes like ``+cpu``."""
    differ: dict[str, str | None] = {}
    for name, pinned in pins.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            differ[name] = None
        else:
            if version.split("+")[0] != pinned:
                differ[name] = version
    return differ


def open_store(url: str) -> tuple[Any, str]:
    """Returns a URL's file system and the path in it: S3 and Google Cloud Storage by pyarrow, as a run does."""
    import fsspec

    if url.startswith(("s3://", "gs://")):
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow.fs import FileSystem

        files, path = FileSystem.from_uri(url)
        return ArrowFSWrapper(files), path
    found: tuple[Any, str] = fsspec.url_to_fs(url)
    return found


def open_marker(storage: str, name: str, mode: str) -> Any:
    """Opens a marker in a folder or below a URL."""
    path = f"{storage.rstrip('/')}/{name}"
    if "://" not in storage:
        return open(path, mode)
    files, path = open_store(path)
    return files.open(path, mode)


def check_folder(storage: str) -> None:
    """Raises FileNotFoundError for a folder that does not exist. If it were created, it would hide a missing mount."""
    if "://" not in storage and not os.path.isdir(storage):
        raise FileNotFoundError(MISSING)


def write_marker(storage: str, name: str) -> None:
    """Writes a marker."""
    check_folder(storage)
    with open_marker(storage, name, "wb") as file:
        file.write(name.encode())


def has_marker(storage: str, name: str) -> bool:
    """Returns whether a marker can be read."""
    try:
        with open_marker(storage, name, "rb") as file:
            return bool(file.read().decode() == name)
    except OSError:
        return False


def remove_marker(storage: str, name: str) -> None:
    """Removes a marker if it exists."""
    path = f"{storage.rstrip('/')}/{name}"
    try:
        if "://" in storage:
            files, path = open_store(path)
            files.rm(path)
        else:
            os.remove(path)
    except (ImportError, OSError, ValueError):
        pass


def has_run(storage: str, run: str) -> bool:
    """Returns whether the storage has a run, ``name/id``, an id alone, or a name with one run."""

    def count(path: str) -> int:
        if "://" not in storage:
            return len(glob.glob(f"{glob.escape(storage)}/runs/{path}/experiment.toml"))
        files, root = open_store(storage)
        return len(files.glob(f"{root.rstrip('/')}/runs/{path}/experiment.toml"))

    return count(run) > 0 if "/" in run else count(f"*/{run}") > 0 or count(f"{run}/*") == 1


def storage_fault(error: Exception) -> str:
    """Returns why a storage cannot be used."""
    if isinstance(error, ImportError):  # fsspec names the library
        return f"its library is missing: {str(error).strip()}, on every node, beside the Python that Ray runs with"
    return MISSING if str(error) == MISSING else f"{type(error).__name__}: {error}"


def machine_facts(pins: dict[str, str], cache: str) -> dict[str, Any]:
    """Returns Python's version and path, the packages that differ, and whether the submitter's cache is visible here:
    ``cache`` is a file in it, created for this probe."""
    return {
        "python": platform.python_version(), "executable": sys.executable, "differ": find_differences(pins),
        "cache": bool(cache) and os.path.exists(cache) and os.access(os.path.dirname(cache), os.W_OK), "fault": "",
    }  # fmt: skip


def probe_node(pins: dict[str, str], storage: str, marker: str, own_marker: str, cache: str = "") -> dict[str, Any]:
    """Returns the facts of a node, and whether it sees the driver's marker; writes its own."""
    report = machine_facts(pins, cache) | {"host": socket.gethostname(), "shared": True}
    if storage:
        try:
            check_folder(storage)
            report["shared"] = has_marker(storage, marker)
            if report["shared"]:
                write_marker(storage, own_marker)
        except Exception as error:
            report["fault"] = storage_fault(error)
    return report


def probe_nodes(nodes: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the report of ``probe_node`` by node id; for a node that does not answer in time, what Ray knows of it.
    ``arguments`` are those of ``probe_node``, by node id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    reports: dict[str, dict[str, Any]] = {}
    errors: dict[str, list[str]] = {node["NodeID"]: [] for node in nodes}
    pending: dict[Any, str] = {}

    def unanswered() -> list[str]:
        return [id for id in errors if id not in reports and not fails_repeatedly(errors[id])]

    end, tries = time.monotonic() + NODE_S, 0
    while unanswered() and time.monotonic() < end:
        tries += 1
        for id in unanswered():
            strategy = NodeAffinitySchedulingStrategy(id, soft=False)
            task = ray.remote(probe_node).options(num_cpus=0, scheduling_strategy=strategy)
            pending[task.remote(*arguments[id])] = id
        retry_at = min(end, time.monotonic() + RETRY_S)
        while unanswered() and (left_s := retry_at - time.monotonic()) > 0:
            if not pending:  # all have failed
                time.sleep(min(left_s, 1.0))
                continue
            for result in ray.wait(list(pending), num_returns=1, timeout=left_s)[0]:
                id = pending.pop(result)
                try:
                    reports[id] = ray.get(result, timeout=left_s)
                except Exception as error:
                    errors[id].append((str(error).strip().splitlines() or [type(error).__name__])[-1])
    return {
        node["NodeID"]: reports.get(node["NodeID"]) or report_without_answer(node, tries, errors[node["NodeID"]])
        for node in nodes
    }


def fails_repeatedly(errors: list[str]) -> bool:
    """Returns whether a node's last errors are equal, and enough of them."""
    return len(errors) >= EQUAL_ERRORS and len(set(errors[-EQUAL_ERRORS:])) == 1


def report_without_answer(node: dict[str, Any], tries: int, errors: list[str]) -> dict[str, Any]:
    """Returns the report of a node that has not answered."""
    import ray

    id = node["NodeID"]
    free = ray._private.state.available_resources_per_node().get(id, {})  # type: ignore[no-untyped-call]
    if not any(other["NodeID"] == id and other["Alive"] for other in ray.nodes()):  # type: ignore[no-untyped-call]
        state = "Ray has lost it since"
    else:
        state = f"Ray lists it as alive, {free.get('CPU', 0):g} of its {node['Resources'].get('CPU', 0):g} CPUs free"
    if fails_repeatedly(errors):
        fault = f"the probe failed there {EQUAL_ERRORS} times in the same way: {errors[-1]}; {state}"
        return {"host": node["NodeManagerHostname"], "fault": fault}
    last = f"; its last error: {errors[-1]}" if errors else ""
    fault = f"did not answer {tries} tries in {NODE_S:.0f} s; {state}{last}"
    return {"host": node["NodeManagerHostname"], "silent": True, "fault": fault}


def probe_cluster(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of the driver's machine and of every node."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    pins, cache = request["pins"], request["cache"]
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    home = os.path.join(os.path.expanduser("~"), "gpipe-storage")  # a folder that outlives the job
    storage = request["storage"] or (home if len(alive) == 1 else "")
    if storage and not request["storage"]:
        os.makedirs(home, exist_ok=True)
    report = machine_facts(pins, cache) | {"home": home, "storage": storage, "nodes": [], "has_run": True}
    marker = f".gpipe-{uuid.uuid4().hex}"
    markers = {node["NodeID"]: f"{marker}-{node['NodeID'][:12]}" for node in alive}
    if storage:
        try:
            write_marker(storage, marker)
            if request.get("run"):
                places = {storage, home} if "://" in storage else {storage}
                report["has_run"] = any(has_run(place, request["run"]) for place in places)
        except Exception as error:
            report["fault"] = storage_fault(error)
            storage = ""
    try:
        reports = probe_nodes(alive, {id: (pins, storage, marker, own, cache) for id, own in markers.items()})
        for node in alive:
            node_report = reports[node["NodeID"]] | {"address": node["NodeManagerAddress"]}
            if storage and node_report.get("shared") and not node_report["fault"]:
                node_report["shared"] = has_marker(storage, markers[node["NodeID"]])
            report["nodes"].append(node_report)
    finally:
        for name in [marker, *markers.values()] if storage else []:
            remove_marker(storage, name)
    return report


if __name__ == "__main__":
    print(MARK + json.dumps(probe_cluster(json.loads(os.environ["GPIPE_PROBE"]))), flush=True)
