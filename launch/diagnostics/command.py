"""``make doctor``: checks this machine or a cluster before a run.

Do the nodes answer, are versions equal, are the offered devices there, is the folder shared, how fast are the links?
With ``RAY_ADDRESS`` or ADDRESS=host:port it asks every node of that Ray cluster: first by a probe that takes no device,
then the links by workers with one device each, as in a run. Every wait has a deadline. A node that misses one is a
fault, and the remaining checks skip it.
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
from launch.backends.link_cache import write_links
from launch.diagnostics import checks
from launch.diagnostics.finding import Finding, count_of, fault, ok, warning
from launch.diagnostics.probes import Host, LocalProbe, Probes, RayProbes
from launch.runs.store import CACHE, RUNS
from suite.errors import SettingError
from suite.paths import hide_secrets

FACTS_S = 60.0
"""Seconds for a node to start its probe and to report; loading Python from a cold disk takes most of them."""

COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def doctor(address: str, storage: str, console: Console) -> bool:
    """Prints a table of findings and saves the link speeds; returns whether there is no fault.

    Raises PlacementError when no cluster answers at the address, SettingError for a storage that is no folder.
    """
    address = address or os.environ.get("RAY_ADDRESS", "")
    if "://" in storage:
        shown = option("STORAGE", hide_secrets(storage))
        raise SettingError(f"{shown} is a URL, and the doctor checks a folder that nodes share; give its path")
    Path(storage).exists()  # raises OSError for an invalid file name
    if not storage:
        with suppress(OSError):  # reported below
            RUNS.mkdir(parents=True, exist_ok=True)
    here = f"checking this machine; {option('ADDRESS', 'host:port')} checks a Ray cluster"
    console.print(f"checking the nodes of {address}" if address else here)
    with closing(RayProbes(address)) if address else nullcontext(LocalProbe()) as probes:
        findings, answered = examine(probes, storage or str(RUNS.absolute()), FACTS_S)
        speeds = None
        if address:
            from launch.diagnostics.links import measure_links  # torch, which takes seconds

            speeds, link_findings = measure_links(answered, probes.cluster, console.print)
            findings += link_findings
    saved = None
    if speeds is not None:
        try:
            saved = write_links(CACHE, speeds)
        except OSError as error:
            text = f"cannot be saved in {CACHE.absolute()}: {error.strerror or error}"
            remedy = "make that folder writable for this user; until then plans assume link speeds"
            findings.append(warning("links", text, remedy))
    console.print(table(findings), soft_wrap=False)
    if saved is not None:
        console.print(f"saved for plans: {saved}")
    console.print(summary(findings))
    return not any(finding.level == "fault" for finding in findings)


def examine(probes: Probes, storage: str, seconds: float) -> tuple[list[Finding], list[Host]]:
    """Checks all nodes; one that does not answer within ``seconds`` is a fault and is skipped from then on. Returns the
    findings, and the nodes that answered."""
    known, silent = probes.ask(probes.nodes, checks.gather, lambda node: (), seconds)
    answered = list(known)
    remedy = "check that its Ray processes run (ray status) and that the suite is installed there, then restart it"
    found = [fault("nodes", f"{node.name} does not answer: {why}", remedy) for node, why in silent.items()]
    if not answered:
        return found, []
    if len(probes.nodes) > 1 and not silent:
        found.append(ok("nodes", f"{len(answered)} answer: {', '.join(node.name for node in answered)}"))
    found += checks.versions(known) + checks.devices(known) + checks.limits(known)
    return found + checks.storage(probes, answered, storage), answered


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
