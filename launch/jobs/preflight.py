"""What a cluster must be for a run to work there, found out before anything is uploaded."""

from __future__ import annotations

import json
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.jobs import probe
from launch.jobs.door import Door, JobError
from launch.jobs.small import run_small
from launch.runs import CACHE

DEADLINE_S = 60.0 + probe.NODE_S
"""Seconds for the probe, from its submission to its answer."""

INSTALL_S = 900
"""Seconds for a node to install what is missing; Ray's head gives a job's start as long."""


@dataclass(frozen=True)
class Ground:
    """Where a job stands on a cluster."""

    nodes: int
    storage: str
    """The folder that all nodes share."""
    url: str
    """Where checkpoints go, and copies of the rest; empty without one."""
    python: str
    """The interpreter to run by: Ray's own, or ``python`` of what is installed for the job."""
    install: dict[str, Any]
    """The part of the job's runtime environment that installs packages; empty where none are missing."""
    lines: tuple[str, ...]
    cache: str = ""
    """The cache folder of the submitter's machine, where the head and all nodes see it; else they have their own."""


def preflight(door: Door, pins: dict[str, str], storage: str, lenient: bool = False) -> Ground:
    """Sends the probe and judges what it saw. Raises JobError for the first thing that would end the run there; a
    ``lenient`` one does not mind nodes or storage, which is the doctor's business."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=CACHE.resolve(), prefix=".seen-") as marker:
        asked = {"pins": pins, "storage": storage, "cache": marker.name}
        said = run_small(door, Path(probe.__file__), "GPIPE_PROBE", asked, DEADLINE_S)
    answers = [line.removeprefix(probe.MARK) for line in said.splitlines() if line.startswith(probe.MARK)]
    if not answers:
        raise JobError(f"the probe of the cluster at {door.address} gave no answer; its log ends with: {said[-300:]}")
    return judge(json.loads(answers[-1]), pins, storage, platform.python_version(), lenient)


def judge(seen: dict[str, Any], pins: dict[str, str], storage: str, here: str, lenient: bool = False) -> Ground:
    """Returns where a job would stand. Raises JobError for what would end it.

    ``seen`` is the answer of ``launch/jobs/probe.py``, ``here`` this machine's Python version.
    """
    nodes = seen["nodes"]
    for node in nodes:
        if node.get("silent") and not lenient:
            raise JobError(
                f"node {_called(node)} {node['fault']}: it is overloaded or hangs; try again when it is less busy, see "
                "`make doctor`, or take it off"
            )
        if node["fault"] and "shared" not in node and not lenient:
            raise JobError(f"node {_called(node)} is not fit for work: {node['fault']}; mend it or take it off")
    answered = [node for node in nodes if "python" in node]
    _check_python([seen | {"host": "the head", "address": ""}, *([] if lenient else answered)], here)
    if not lenient:
        _check_storage(seen, storage)
    install, line = _packages([seen, *([] if lenient else answered)], pins)
    url = storage if "://" in storage else ""
    folder = str(seen["home"] if url or not seen["storage"] else seen["storage"])
    where = f"storage: {folder}"
    if url:
        where += f" on the head, copied to {url}; checkpoints go there at once"
    elif not storage:
        where += ", on the one node there is; it outlives the job"
    python = "python" if install else str(seen["executable"])
    if not seen.get("cache") or not all(node.get("cache") for node in nodes):
        return Ground(len(nodes), folder, url, python, install, (line, where))
    cache = str(CACHE.resolve())
    lines = (line, where, f"cache: {cache}, which the head and all nodes see: what is prepared there is used")
    return Ground(len(nodes), folder, url, python, install, lines, cache)


def _check_python(nodes: list[dict[str, Any]], here: str) -> None:
    ours = here.split(".")[:2]
    for node in nodes:
        if str(node["python"]).split(".")[:2] != ours:
            raise JobError(
                f"{_called(node)} runs Python {node['python']}, here is Python {here}, and Ray's objects go between "
                f"equal minor versions only; submit from a Python {'.'.join(str(node['python']).split('.')[:2])}, or "
                f"set up the cluster with {'.'.join(ours)}"
            )


def _check_storage(seen: dict[str, Any], storage: str) -> None:
    nodes, place = seen["nodes"], seen["storage"]
    if not place:
        raise JobError(
            f"the cluster has {len(nodes)} nodes, and a run needs a place that they all share: give STORAGE=, a folder "
            "that all of them have, or a URL such as s3://bucket/runs"
        )
    if seen["fault"]:
        raise JobError(f"storage {place} cannot be written from the head: {seen['fault']}")
    for node in nodes:
        if node["fault"]:
            raise JobError(f"storage {place} cannot be written from node {_called(node)}: {node['fault']}")
    apart = [_called(node) for node in nodes if not node["shared"]]
    if apart:
        raise JobError(
            f"storage {place} is not one and the same on all nodes: {len(apart)} of {len(nodes)} do not see what the "
            f"head writes there, such as {apart[0]}; give STORAGE= a folder that all of them share, or a URL"
        )


def _packages(nodes: list[dict[str, Any]], pins: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Returns what is to be installed, and a line about it.

    Ray installs into a virtual environment beside the node's own, once a node and set of packages; the job's processes
    run in it, and those of the cluster go on as they are.
    """
    differ: dict[str, str | None] = {}
    for node in nodes:
        differ |= node["differ"]
    if not differ:
        return {}, f"all {len(pins)} pinned packages are on the cluster: nothing is installed"
    told = ", ".join(
        f"{name} {pins[name]} (there: {found or 'none'})" for name, found in sorted(differ.items())[:3]
    )  # fmt: skip
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    wanted = [f"{name}=={pins[name]}" for name in sorted(differ)]
    install = {"pip": {"packages": wanted, "pip_check": False}, "config": {"setup_timeout_seconds": INSTALL_S}}
    line = f"{len(differ)} packages are installed on each node first, which can take minutes: {told}{more}"
    return install, line


def _called(node: dict[str, Any]) -> str:
    return f"{node['host']} ({node['address']})" if node.get("address") else str(node["host"])
