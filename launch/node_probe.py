"""The probe of a cluster's nodes: packages, and whether a folder or store is one place for all of them.

``make submit`` runs this file before anything is uploaded, with the cluster's own Python; so it imports nothing of this
project. The doctor and the start of a run on several nodes call its functions.

first node, or head   writes a marker into the storage ------------> every node reads it, and writes one of its own
                      reads every node's marker  <------------------
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
from contextlib import suppress
from typing import Any

MARK = "@gpipe-probe "
MISSING = "there is no such folder; mount the share there, or make the folder"
NODE_S = 120.0
"""Seconds for all nodes to answer, however busy."""

RETRY_S = 20.0
"""Seconds after which a node that has not answered is probed again, by another process."""

EQUAL_ERRORS = 3
"""Equal errors of a node in a row after which it is not probed again."""

SETTLE_S = 4.0
"""Seconds until a file written on another node must be visible: NFS caches directory entries for at least 3 s."""


def installed_versions(names: list[str]) -> dict[str, str | None]:
    """Returns the version of each package, None for one that is not installed."""
    found = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in names}
    return {name: package.version if package else None for name, package in found.items()}


def same_version(found: str | None, pinned: str) -> bool:
    """Returns whether an installed version is the pinned one; a suffix such as +cpu is no other version."""
    return (found or "").split("+")[0] == pinned


def folder_of(location: str) -> str:
    """Returns the path of a folder, given as a path or as file://; an empty text for the URL of an object store."""
    scheme, _, path = location.rpartition("://")
    return path if scheme in ("", "file", "local") else ""


def open_store(url: str) -> tuple[Any, str]:
    """Returns a URL's file system and the path in it: S3 and Google Cloud Storage by pyarrow, as a run does."""
    import fsspec

    if url.startswith(("s3://", "gs://")):
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow.fs import FileSystem

        files, path = FileSystem.from_uri(url)
        return ArrowFSWrapper(files), path
    found: tuple[Any, str] = fsspec.url_to_fs(url, use_listings_cache=False)
    return found


def _open(storage: str, name: str, mode: str) -> Any:
    """Opens a file in a folder, which needs no library, or below a URL."""
    if folder := folder_of(storage):
        return open(os.path.join(folder, name), mode)
    files, path = open_store(f"{storage.rstrip('/')}/{name}")
    return files.open(path, mode)


def _fault(error: Exception) -> str:
    if isinstance(error, ImportError):  # fsspec names the library
        return f"its library is missing: {str(error).strip()}, on every node, beside the Python that Ray runs with"
    return (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"


def write_marker(storage: str, name: str) -> str:
    """Writes a file with its own name as text; returns why that failed. A missing folder is not created: that would
    hide a missing mount."""
    if (folder := folder_of(storage)) and not os.path.isdir(folder):
        return MISSING
    try:
        with _open(storage, name, "wb") as file:
            file.write(name.encode())
    except Exception as error:  # each store's library has its own errors
        return _fault(error)
    return ""


def unseen_markers(storage: str, names: list[str], timeout_s: float) -> list[str]:
    """Returns the markers that cannot be read in time, or do not have their own name as text."""
    until = time.monotonic() + timeout_s
    while True:
        unseen = [name for name in names if not _has_marker(storage, name)]
        if not unseen or time.monotonic() >= until:
            return unseen
        time.sleep(0.2)


def _has_marker(storage: str, name: str) -> bool:
    try:
        with _open(storage, name, "rb") as file:
            return bool(file.read() == name.encode())
    except OSError:
        return False


def remove_markers(storage: str, names: list[str]) -> None:
    for name in names:
        with suppress(ImportError, OSError, ValueError):
            if folder := folder_of(storage):
                os.remove(os.path.join(folder, name))
            else:
                files, path = open_store(f"{storage.rstrip('/')}/{name}")
                files.rm(path)


def has_run(storage: str, run: str) -> bool:
    """Returns whether the storage has a run, ``name/id``, an id alone, or a name with one run."""

    def count(path: str) -> int:
        if folder := folder_of(storage):
            return len(glob.glob(f"{glob.escape(folder)}/runs/{path}/experiment.toml"))
        files, root = open_store(storage)
        return len(files.glob(f"{root.rstrip('/')}/runs/{path}/experiment.toml"))

    return count(run) > 0 if "/" in run else count(f"*/{run}") > 0 or count(f"{run}/*") == 1


def machine_facts(packages: list[str], cache: str) -> dict[str, Any]:
    """Returns Python's version and path, those of packages, and whether the submitter's cache is visible here:
    ``cache`` is a file in it, created for this probe."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": installed_versions(packages),
        "cache": bool(cache) and os.path.exists(cache) and os.access(os.path.dirname(cache), os.W_OK),
        "fault": "",
    }


def probe_node(packages: list[str], storage: str, marker: str, own_marker: str, cache: str = "") -> dict[str, Any]:
    """Returns the facts of a node, and whether it sees the driver's marker in the storage, if any; writes its own."""
    report = machine_facts(packages, cache) | {"host": socket.gethostname(), "shared": True}
    if (folder := folder_of(storage)) and not os.path.isdir(folder):
        return report | {"fault": MISSING}
    if storage:
        try:
            report["shared"] = not unseen_markers(storage, [marker], SETTLE_S)
        except Exception as error:  # each store's library has its own errors
            return report | {"fault": _fault(error)}
        report["fault"] = write_marker(storage, own_marker) if report["shared"] else ""
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
        return [id for id in errors if id not in reports and not _fails_repeatedly(errors[id])]

    end, retry_at, tries = time.monotonic() + NODE_S, 0.0, 0
    while (waiting := unanswered()) and (now := time.monotonic()) < end:
        if now >= retry_at:
            retry_at, tries = now + RETRY_S, tries + 1
            for id in waiting:
                strategy = NodeAffinitySchedulingStrategy(id, soft=False)
                task = ray.remote(probe_node).options(num_cpus=0, scheduling_strategy=strategy)
                pending[task.remote(*arguments[id])] = id
        pause_s = min(1.0, end - now, retry_at - now)
        if not pending:  # all have failed
            time.sleep(pause_s)
            continue
        for result in ray.wait(list(pending), num_returns=1, timeout=pause_s)[0]:
            id = pending.pop(result)
            try:
                reports[id] = ray.get(result, timeout=RETRY_S)
            except Exception as error:  # of many types: raised by Ray, or in the task
                errors[id].append((str(error).strip().splitlines() or [type(error).__name__])[-1])
    for node in nodes:
        id = node["NodeID"]
        if id not in reports:
            reports[id] = {"host": node["NodeManagerHostname"]} | _no_answer(node, tries, errors[id])
    return reports


def _fails_repeatedly(errors: list[str]) -> bool:
    """Returns whether a node's last errors are equal, and enough of them."""
    return len(errors) >= EQUAL_ERRORS and len(set(errors[-EQUAL_ERRORS:])) == 1


def _no_answer(node: dict[str, Any], tries: int, errors: list[str]) -> dict[str, Any]:
    """Returns why a node has not answered, with what Ray knows of it."""
    import ray

    id = node["NodeID"]
    free = ray._private.state.available_resources_per_node().get(id, {})  # type: ignore[no-untyped-call]
    if not any(other["NodeID"] == id and other["Alive"] for other in ray.nodes()):  # type: ignore[no-untyped-call]
        state = "Ray has lost it since"
    else:
        state = f"Ray lists it as alive, {free.get('CPU', 0):g} of its {node['Resources'].get('CPU', 0):g} CPUs free"
    if _fails_repeatedly(errors):
        return {"fault": f"the probe failed there {EQUAL_ERRORS} times in the same way: {errors[-1]}; {state}"}
    last = f"; its last error: {errors[-1]}" if errors else ""
    return {"silent": True, "fault": f"did not answer {tries} tries in {NODE_S:.0f} s; {state}{last}"}


def probe_cluster(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of the driver's machine and of every node."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    packages, cache = request["packages"], request["cache"]
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    home = os.path.join(os.path.expanduser("~"), "gpipe-storage")  # a folder that outlives the job
    storage = request["storage"] or (home if len(alive) == 1 else "")
    if storage and not request["storage"]:
        os.makedirs(home, exist_ok=True)
    report = machine_facts(packages, cache) | {"home": home, "storage": storage, "nodes": [], "has_run": True}
    marker = f".gpipe-{uuid.uuid4().hex}"
    markers = {node["NodeID"]: f"{marker}-{node['NodeID'][:12]}" for node in alive}
    report["fault"] = write_marker(storage, marker) if storage else ""
    storage = "" if report["fault"] else storage
    try:
        if storage and request["run"]:
            places = {storage, home} if "://" in storage else {storage}
            try:
                report["has_run"] = any(has_run(place, request["run"]) for place in places)
            except Exception as error:  # each store's library has its own errors
                report["fault"] = _fault(error)
        reports = probe_nodes(alive, {id: (packages, storage, marker, own, cache) for id, own in markers.items()})
        wrote = [id for id, own in reports.items() if storage and own.get("shared") and not own["fault"]]
        unseen = unseen_markers(storage, [markers[id] for id in wrote], SETTLE_S)
        for id in wrote:
            reports[id]["shared"] = markers[id] not in unseen
        report["nodes"] = [reports[node["NodeID"]] | {"address": node["NodeManagerAddress"]} for node in alive]
    finally:
        if storage:
            remove_markers(storage, [marker, *markers.values()])
    return report


if __name__ == "__main__":
    print(MARK + json.dumps(probe_cluster(json.loads(os.environ["GPIPE_REQUEST"]))), flush=True)
