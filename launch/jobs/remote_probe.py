"""Runs on the cluster before anything is uploaded, by the cluster's own Python: imports nothing of ours.

driver, on the head   writes a marker into the storage ------------> every node reads it, and writes one of its own
driver                reads every node's marker  <-----------------
"""

from __future__ import annotations

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
"""Seconds after which a node that has not answered is asked again, by another process there."""

EQUAL_ERRORS = 3
"""Equal errors of a node in a row after which it is not asked again."""


def versions(pins: dict[str, str]) -> dict[str, str | None]:
    """Returns package -> the version found, or None, for each that is not as pinned. ``+cpu`` and such do not count."""
    found: dict[str, str | None] = {}
    for name, wanted in pins.items():
        version: str | None
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or version.split("+")[0] != wanted:
            found[name] = version
    return found


def join(place: str, name: str) -> str:
    """Returns a file's place in a folder or below a URL."""
    return place.rstrip("/") + "/" + name


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


def put(place: str, name: str) -> None:
    """Writes a marker."""
    if "://" in place:
        files, path = open_store(join(place, name))
        with files.open(path, "wb") as file:
            file.write(name.encode())
    else:
        if not os.path.isdir(place):  # made here, it would hide a share that is not mounted
            raise FileNotFoundError(MISSING)
        with open(join(place, name), "w") as file:
            file.write(name)


def reason(error: Exception) -> str:
    """Returns why a place cannot be used, as a sentence has it."""
    if isinstance(error, ImportError):  # fsspec names the library
        return "its library is missing: " + str(error).strip() + ", on every node, beside the Python that Ray runs with"
    return MISSING if str(error) == MISSING else type(error).__name__ + ": " + str(error)


def exists(place: str, name: str) -> bool:
    """Whether a marker can be read."""
    try:
        if "://" in place:
            files, path = open_store(join(place, name))
            with files.open(path, "rb") as file:
                return bool(file.read().decode() == name)
        with open(join(place, name)) as file:
            return file.read() == name
    except OSError:
        return False


def remove(place: str, name: str) -> None:
    """Takes a marker away."""
    try:
        if "://" in place:
            files, path = open_store(join(place, name))
            files.rm(path)
        else:
            os.remove(join(place, name))
    except (ImportError, OSError, ValueError):
        pass


def sees_cache(marker: str) -> bool:
    """Whether the submitter's cache folder is here, too: a file in it that was made for this probe."""
    return bool(marker) and os.path.exists(marker) and os.access(os.path.dirname(marker), os.W_OK)


def probe_cluster(pins: dict[str, str], place: str, marker: str, mine: str, cache: str = "") -> dict[str, Any]:
    """What each node says of itself."""
    told: dict[str, Any] = {
        "host": socket.gethostname(), "python": platform.python_version(), "executable": sys.executable,
        "differ": versions(pins), "shared": True, "fault": "", "cache": sees_cache(cache),
    }  # fmt: skip
    if place:
        try:
            if "://" not in place and not os.path.isdir(place):
                raise FileNotFoundError(MISSING)
            told["shared"] = exists(place, marker)
            if told["shared"]:
                put(place, mine)
        except Exception as error:
            told["fault"] = reason(error)
    return told


def ask(alive: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns what ``look`` says on each node, by the node's id; for one that does not answer in time, what was seen
    of it. ``arguments`` are those of ``look``, by the node's id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    answers: dict[str, dict[str, Any]] = {}
    errors: dict[str, list[str]] = {}
    waiting: dict[Any, str] = {}
    begin, tries = time.monotonic(), 0
    while (silent := unsettled(alive, answers, errors)) and time.monotonic() < begin + NODE_S:
        tries += 1
        for id in silent:
            where = NodeAffinitySchedulingStrategy(id, soft=False)
            task = ray.remote(probe_cluster).options(num_cpus=0, scheduling_strategy=where)
            waiting[task.remote(*arguments[id])] = id
        until = min(begin + NODE_S, time.monotonic() + RETRY_S)
        while unsettled(alive, answers, errors) and (left := until - time.monotonic()) > 0:
            if not waiting:  # each has failed
                time.sleep(min(left, 1.0))
                continue
            for answer in ray.wait(list(waiting), num_returns=1, timeout=left)[0]:
                id = waiting.pop(answer)
                try:
                    answers[id] = ray.get(answer, timeout=left)
                except Exception as error:
                    errors.setdefault(id, []).append(last_line(error))
    return {node["NodeID"]: answers.get(node["NodeID"]) or missing(node, tries, errors) for node in alive}


def unsettled(
    alive: list[dict[str, Any]], answers: dict[str, dict[str, Any]], errors: dict[str, list[str]]
) -> list[str]:
    """Returns the ids of nodes that have not answered, but for those that fail in the same way each time."""
    ids = [node["NodeID"] for node in alive if node["NodeID"] not in answers]
    return [id for id in ids if not settled(errors.get(id, []))]


def settled(errors: list[str]) -> bool:
    """Whether a node's last errors are equal, and enough of them."""
    return len(errors) >= EQUAL_ERRORS and len(set(errors[-EQUAL_ERRORS:])) == 1


def last_line(error: Exception) -> str:
    """Returns the last line of what an error says, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def missing(node: dict[str, Any], tries: int, errors: dict[str, list[str]]) -> dict[str, Any]:
    """What was seen of a node that has not answered."""
    import ray

    now = {one["NodeID"]: one["Alive"] for one in ray.nodes()}  # type: ignore[no-untyped-call]
    free = ray._private.state.available_resources_per_node().get(node["NodeID"], {})  # type: ignore[no-untyped-call]
    if not now.get(node["NodeID"]):
        state = "Ray has lost it since"
    else:
        state = f"Ray lists it as alive, {free.get('CPU', 0):g} of its {node['Resources'].get('CPU', 0):g} CPUs free"
    failed = errors.get(node["NodeID"], [])
    if settled(failed):
        return {
            "host": node["NodeManagerHostname"],
            "fault": f"the probe failed there {EQUAL_ERRORS} times in the same way: {failed[-1]}; {state}",
        }
    last = f"; its last error: {failed[-1]}" if failed else ""
    return {
        "host": node["NodeManagerHostname"], "silent": True,
        "fault": f"did not answer {tries} tries in {NODE_S:.0f} s; {state}{last}",
    }  # fmt: skip


def probe(asked: dict[str, Any]) -> dict[str, Any]:
    """Looks at the driver's machine and at every node, and returns what was seen."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    home = os.path.join(os.path.expanduser("~"), "gpipe-storage")  # a folder that outlives the job
    place = asked["storage"] or (home if len(alive) == 1 else "")
    if place and not asked["storage"]:
        os.makedirs(home, exist_ok=True)
    marker = ".gpipe-" + uuid.uuid4().hex
    seen: dict[str, Any] = {
        "home": home,
        "python": platform.python_version(),
        "executable": sys.executable,
        "storage": place,
        "fault": "",
        "nodes": [],
        "cache": sees_cache(asked["cache"]),
    }
    seen["differ"] = versions(asked["pins"])
    marks = {node["NodeID"]: marker + "-" + node["NodeID"][:12] for node in alive}
    if place:
        try:
            put(place, marker)
        except Exception as error:
            seen["fault"] = reason(error)
            place = ""
    try:
        arguments = {id: (asked["pins"], place, marker, mark, asked["cache"]) for id, mark in marks.items()}
        answers = ask(alive, arguments)
        for node in alive:
            told = answers[node["NodeID"]]
            if place and told.get("shared") and not told["fault"]:
                told["shared"] = exists(place, marks[node["NodeID"]])
            seen["nodes"].append(dict(told, address=node["NodeManagerAddress"]))
    finally:
        for name in [marker, *marks.values()] if place else []:
            remove(place, name)
    return seen


if __name__ == "__main__":
    print(MARK + json.dumps(probe(json.loads(os.environ["GPIPE_PROBE"]))), flush=True)
