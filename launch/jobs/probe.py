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
import uuid
from typing import Any

MARK = "@gpipe-probe "
MISSING = "there is no such folder; mount the share there, or make the folder"
NODE_S = 30.0
"""Seconds for all nodes to answer."""


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


def put(place: str, name: str) -> None:
    """Writes a marker."""
    if "://" in place:
        import fsspec

        with fsspec.open(join(place, name), "w") as file:
            file.write(name)
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


def there(place: str, name: str) -> bool:
    """Whether a marker can be read."""
    try:
        if "://" in place:
            import fsspec

            with fsspec.open(join(place, name)) as file:
                return bool(file.read().decode() == name)
        with open(join(place, name)) as file:
            return file.read() == name
    except OSError:
        return False


def remove(place: str, name: str) -> None:
    """Takes a marker away."""
    try:
        if "://" in place:
            import fsspec

            files, path = fsspec.url_to_fs(join(place, name))
            files.rm(path)
        else:
            os.remove(join(place, name))
    except (ImportError, OSError, ValueError):
        pass


def look(pins: dict[str, str], place: str, marker: str, mine: str) -> dict[str, Any]:
    """What each node says of itself."""
    told: dict[str, Any] = {
        "host": socket.gethostname(), "python": platform.python_version(), "executable": sys.executable,
        "differ": versions(pins), "shared": True, "fault": "",
    }  # fmt: skip
    if place:
        try:
            if "://" not in place and not os.path.isdir(place):
                raise FileNotFoundError(MISSING)
            told["shared"] = there(place, marker)
            if told["shared"]:
                put(place, mine)
        except Exception as error:
            told["fault"] = reason(error)
    return told


def probe(asked: dict[str, Any]) -> dict[str, Any]:
    """Looks at the driver's machine and at every node, and returns what was seen."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
        waiting = {
            ray.remote(look)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote(asked["pins"], place, marker, marks[node["NodeID"]]): node
            for node in alive
        }
        ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=NODE_S)
        for answer in ready:
            node = waiting[answer]
            try:
                told = ray.get(answer)
            except Exception as error:
                told = {"host": node["NodeManagerHostname"], "fault": str(error).strip().splitlines()[-1]}
            if place and told.get("shared") and not told["fault"]:
                told["shared"] = there(place, marks[node["NodeID"]])
            seen["nodes"].append(dict(told, address=node["NodeManagerAddress"]))
        for answer in late:
            node = waiting[answer]
            told = {"host": node["NodeManagerHostname"], "fault": f"did not answer in {NODE_S:.0f} s"}
            seen["nodes"].append(dict(told, address=node["NodeManagerAddress"]))
    finally:
        for name in [marker, *marks.values()] if place else []:
            remove(place, name)
    return seen


if __name__ == "__main__":
    print(MARK + json.dumps(probe(json.loads(os.environ["GPIPE_PROBE"]))), flush=True)
