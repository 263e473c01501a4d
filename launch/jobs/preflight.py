"""Checks before an upload that a cluster can run a job."""

from __future__ import annotations

import json
import platform
import tempfile
from dataclasses import dataclass
from typing import Any

from experiments.base.hints import command, option
from experiments.custom.own_imports import ROOT
from launch import node_probe
from launch.jobs.client import JobClient, JobError
from launch.jobs.remote_script import run_script
from launch.jobs.requirements import pinned_requirements
from launch.jobs.source_package import first_few
from launch.runs.store import CACHE
from suite.paths import hide_secrets

DEADLINE_S = 60.0 + node_probe.NODE_S
"""Seconds from the probe's submission to its answer."""

INSTALL_S = 900
"""Seconds for a node to install missing packages; Ray's head waits as long for a job to start."""


@dataclass(frozen=True)
class JobEnvironment:
    """Where and how a job runs on a cluster."""

    storage: str
    """The folder shared by all nodes."""
    url: str
    """Where checkpoints and copies of other files go; empty if there is none."""
    python: str
    """The interpreter: Ray's own, or ``python`` of the job's virtual environment."""
    install: dict[str, Any]
    """The part of the job's runtime environment that installs packages; empty if none are missing."""
    lines: tuple[str, ...]
    cache: str = ""
    """The submitter's cache folder if the head and all nodes see it; otherwise empty, and each node has its own."""


def preflight(client: JobClient, storage: str, lenient: bool = False, run: str = "") -> JobEnvironment:
    """Runs the probe and checks its report. Raises JobError for the first thing that would make a run fail; with
    ``lenient`` it ignores nodes and storage, which the doctor checks. ``run`` is one to resume, which must be there."""
    pins = pinned_requirements(ROOT)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=CACHE.resolve(), prefix=".seen-") as marker:
        request = {"packages": list(pins), "storage": storage, "cache": marker.name, "run": run}
        printed = run_script(client, node_probe, request, DEADLINE_S)
    answers = [line for line in printed.splitlines() if line.startswith(node_probe.MARK)]
    if not answers:
        raise JobError(
            f"the probe of the cluster at {client.address} returned nothing; its log ends with: {printed[-300:]}"
        )
    report = json.loads(answers[-1].removeprefix(node_probe.MARK))
    environment = check_probe_report(report, pins, storage, platform.python_version(), lenient)
    if not report["has_run"]:
        raise JobError(
            f"there is no run {run} in {hide_secrets(report['storage'])}/runs of the cluster at {client.address}; "
            f"{command('jobs', ADDRESS=client.address)} shows where jobs write"
        )
    return environment


def check_probe_report(
    report: dict[str, Any], pins: dict[str, str], storage: str, own_python: str, lenient: bool = False
) -> JobEnvironment:
    """Returns where a job would run. Raises JobError for what would make it fail.

    ``report`` is the output of ``launch/node_probe.py``, ``own_python`` this machine's Python version.
    """
    nodes, machines = report["nodes"], [report | {"host": "the head", "address": ""}]
    if not lenient:
        _check_answers(nodes)
        machines += nodes
    _check_python(machines, own_python)
    if not lenient:
        _check_storage(report)
    install, line = _packages(machines, pins)
    url = storage if "://" in storage else ""
    folder = str(report["home"] if url or not report["storage"] else report["storage"])
    where = f"storage: {folder}"
    if url:
        where += f" on the head, copied to {hide_secrets(url)}; checkpoints are written there directly"
    elif not storage:
        where += ", on the only node; it outlives the job"
    lines, cache = [line, where], ""
    if all(machine.get("cache") for machine in (report, *nodes)):
        cache = str(CACHE.resolve())
        lines.append(f"cache: {cache}, shared with the head and all nodes: data prepared there is reused")
    python = "python" if install else str(report["executable"])
    return JobEnvironment(folder, url, python, install, tuple(lines), cache)


def _check_answers(nodes: list[dict[str, Any]]) -> None:
    for node in nodes:
        if node.get("silent"):
            raise JobError(
                f"node {_name(node)} {node['fault']}: it is overloaded or hangs; try again when it is less busy, run "
                f"`{command('doctor', ADDRESS='http://<head>:8265')}`, or remove the node"
            )
        if "python" not in node:
            raise JobError(f"node {_name(node)} cannot be used: {node['fault']}; repair or remove it")


def _check_python(nodes: list[dict[str, Any]], own_python: str) -> None:
    own_minor = own_python.rpartition(".")[0]
    for node in nodes:
        python = str(node["python"])
        minor = python.rpartition(".")[0]
        if minor != own_minor:
            raise JobError(
                f"{_name(node)} runs Python {python}, this machine Python {own_python}, and Ray needs equal minor "
                f"versions; submit from Python {minor}, or set up the cluster with {own_minor}"
            )


def _check_storage(report: dict[str, Any]) -> None:
    nodes, location = report["nodes"], hide_secrets(report["storage"] or "")
    if not location:
        raise JobError(
            f"the cluster has {len(nodes)} nodes, and a run needs storage shared by all of them: give "
            f"{option('STORAGE')}, a shared folder or a URL such as s3://bucket/runs"
        )
    for who, machine in (("the head", report), *((f"node {_name(node)}", node) for node in nodes)):
        if machine["fault"]:
            raise JobError(f"{who} cannot write to storage {location}: {machine['fault']}")
    not_shared = [_name(node) for node in nodes if not node["shared"]]
    if not_shared:
        raise JobError(
            f"storage {location} is not the same folder on all nodes: {len(not_shared)} of {len(nodes)} do not see "
            f"the head's files there, such as {not_shared[0]}; set {option('STORAGE')} to a folder shared by all "
            "nodes, or a URL"
        )


def _packages(nodes: list[dict[str, Any]], pins: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Returns the part of the runtime environment that installs packages, and a line about it.

    Ray installs into a virtual environment on top of the node's own, once per node and set of packages. Only the job's
    processes use it.
    """
    differ = {
        name: found
        for node in nodes
        for name, found in node["versions"].items()
        if not node_probe.same_version(found, pins[name])
    }
    if not differ:
        return {}, f"all {len(pins)} pinned packages are installed on the cluster"
    texts = [f"{name} {pins[name]} (found: {found or 'none'})" for name, found in sorted(differ.items())]
    wanted = [f"{name}=={pins[name]}" for name in sorted(differ)]
    install = {"pip": {"packages": wanted, "pip_check": False}, "config": {"setup_timeout_seconds": INSTALL_S}}
    line = f"each node first installs {len(differ)} packages, which can take minutes: {first_few(texts)}"
    return install, line


def _name(node: dict[str, Any]) -> str:
    return f"{node['host']} ({node['address']})" if node.get("address") else str(node["host"])
