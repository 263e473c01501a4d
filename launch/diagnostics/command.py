"""``make doctor``: checks this machine or a cluster before a run.

With ``RAY_ADDRESS`` or ADDRESS=host:port it examines every node of that Ray cluster: first by a probe that takes no
device, then the links by workers with one device each, as in a run. Every wait has a deadline. A node that misses one
is a fault, and the remaining checks skip it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.base.hints import option
from launch import node_probe
from launch.backends.link_cache import write_links
from launch.diagnostics import cross_node_checks, link_benchmark, link_report, node_checks, node_facts
from launch.diagnostics.finding import Finding, count_of, fault, ok, warning
from launch.diagnostics.probes import LocalProbe, Node, Probes, RayProbes
from launch.ray_nodes import own_node
from launch.runs.store import CACHE, RUNS
from suite.log import Log
from suite.training.checkpoint.storage import Storage

FACTS_S = 60.0
"""Seconds for a node to start its probe and to report; loading Python from a cold disk takes most of them."""

COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def doctor(address: str, storage: str, console: Console) -> bool:
    """Prints a table of findings and saves the link speeds; returns whether there is no fault.

    Raises PlacementError when no cluster answers at the address, CheckpointError for an unknown kind of storage.
    """
    address = address or os.environ.get("RAY_ADDRESS", "")
    place = storage or str(RUNS.absolute())
    Storage(place)
    Path(place).exists()  # raises OSError for an invalid file name
    if not storage:
        with suppress(OSError):  # reported below
            RUNS.mkdir(parents=True, exist_ok=True)
    here = f"checking this machine; {option('ADDRESS', 'host:port')} checks a Ray cluster"
    console.print(f"checking the nodes of {address}" if address else here)
    with closing(RayProbes(address)) if address else nullcontext(LocalProbe()) as probes:
        findings, linked = examine(probes, place, FACTS_S)
        links, measured = measure(probes.nodes, linked, console.print)
    findings += links
    saved = None
    if measured is not None:
        try:
            saved = write_links(CACHE, link_report.to_link_speeds(measured, probes.cluster))
        except OSError as error:
            text = f"cannot be saved in {CACHE.absolute()}: {error.strerror or error}"
            remedy = "make that folder writable for this user; until then plans assume link speeds"
            findings.append(warning("links", text, remedy))
    console.print(table(findings), soft_wrap=False)
    if saved is not None:
        console.print(f"saved for plans: {saved}")
    console.print(summary(findings))
    return not any(finding.level == "fault" for finding in findings)


def examine(probes: Probes, storage: str, seconds: float) -> tuple[list[Finding], list[Node]]:
    """Checks all nodes; one that does not answer within ``seconds`` is a fault and is skipped from then on. Returns the
    findings, and the nodes whose links can be measured: those that answered, or none if torch.distributed cannot
    connect all of them."""
    folders = [folder for folder in (probes.temporary, node_probe.folder_of(storage)) if folder]
    known, silent = probes.ask(probes.nodes, node_facts.gather, lambda node: (folders,), seconds)
    answered = list(known)
    remedy = "check that its Ray processes run (ray status) and that the suite is installed there, then restart it"
    found = [fault("nodes", f"{node.name} does not answer: {why}", remedy) for node, why in silent.items()]
    if not answered:
        return found, []
    if len(probes.nodes) > 1 and not silent:
        found.append(ok("nodes", f"{len(answered)} answer: {', '.join(node.name for node in answered)}"))
    found += node_checks.versions(known) + node_checks.devices(known) + node_checks.shared_memory(known)
    found += node_checks.disk(known, probes.temporary) + cross_node_checks.storage(probes, answered, storage)
    linked = True
    if len(answered) > 1:
        found += cross_node_checks.clocks(probes, answered)
        port_findings, linked = cross_node_checks.ports(probes, answered)
        found += port_findings
    return found + cross_node_checks.wandb(probes, answered), answered if linked else []


def measure(
    nodes: Sequence[Node], linked: Sequence[Node], log: Log
) -> tuple[list[Finding], link_benchmark.LinkMeasurements | None]:
    """Measures links between the ``linked`` nodes, with Ray workers if there is a cluster, and without Ray."""
    measured, link_findings, here = None, [], nodes[0]
    if not linked:
        remedy = "fix the faults of nodes and ports, then run the doctor again"
        link_findings = [warning("links", "not measured, because not every node reaches every other", remedy)]
    elif here.id:
        measured, link_findings = link_benchmark.measure_with_ray(linked, log)
    if here.id:
        here = next((node for node in nodes if node.id == own_node()), here)
    log(f"measuring without Ray, between two processes of {here.name}")
    plain, more = link_benchmark.measure_without_ray(here.name)
    return [*link_findings, *link_report.findings_of(measured, plain), *more], measured


def table(findings: Sequence[Finding]) -> Table:
    """Returns the findings for the terminal, each remedy below its fault."""
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for finding in findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        rows.add_row(Text(finding.level, COLOURS[finding.level]), finding.subject, f"{finding.found}{remedy}")
    return rows


def summary(findings: Sequence[Finding]) -> str:
    faults = sum(finding.level == "fault" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if not faults and not warnings:
        return f"{len(findings)} checks, all ok"
    return f"{count_of(faults, 'fault')}, {count_of(warnings, 'warning')} in {len(findings)} checks"
