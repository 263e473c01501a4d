"""``make doctor``: what would go wrong on this machine or this cluster, found before a run and not within it.

With ``RAY_ADDRESS`` or ADDRESS=host:port every node of that Ray cluster is examined, by a probe that takes no device,
then the links, by workers that take one as a run's do. Every wait has a deadline; a node that lets it pass is a fault
by that alone, and what comes after is asked of the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.doctor import asking, checks, link_workers, markers, speeds
from launch.doctor.finding import Finding, fault, ok, warning
from launch.doctor.kept import write_links
from launch.doctor.nodes import Here, Node, Probes
from launch.doctor.ray_nodes import RayProbes
from launch.runs import CACHE, RUNS
from suite.training.checkpoint.storage import Storage

FACTS_S = 60.0
"""Seconds for a node to start its probe and say what it has; a cold disk takes most of them to load Python."""

COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}

Say = Callable[[str], None]


def doctor(address: str, storage: str, console: Console) -> bool:
    """Prints a table of findings and keeps the links' speeds; returns whether there is no fault.

    Raises PlacementError when no cluster answers at the address, CheckpointError for a storage of an unknown kind.
    """
    address = address or os.environ.get("RAY_ADDRESS", "")
    place = storage or str(RUNS.absolute())
    Storage(place)
    Path(place).exists()  # raises OSError for what can be no name of a file
    if not storage:
        with suppress(OSError):  # what cannot be written is found below
            RUNS.mkdir(parents=True, exist_ok=True)
    cluster = "this machine"
    if address:
        console.print(f"asking the nodes of {address}")
        with RayProbes(address) as probes:
            cluster = probes.cluster
            found = examine(probes, place, FACTS_S)
            links, measured, alone = measure(probes.nodes, found, console.print)
    else:
        console.print("asking this machine; ADDRESS=host:port examines a Ray cluster")
        here = Here()
        found = examine(here, place, FACTS_S)
        links, measured, alone = measure(here.nodes, found, console.print)
    findings, kept = [*found.findings, *links], None
    if measured is not None or (not address and alone is not None):
        try:
            kept = write_links(CACHE, speeds.kept(measured, alone, cluster))
        except OSError as error:
            findings.append(
                warning("links", f"cannot be kept in {CACHE.absolute()}: {error.strerror or error}",
                        "make that folder writable for this user: without it the plan assumes its links")
            )  # fmt: skip
    console.print(table(findings), soft_wrap=False)
    if kept is not None:
        console.print(f"kept for the plan: {kept}")
    console.print(summary(findings))
    return not any(one.level == "fault" for one in findings)


@dataclass(frozen=True)
class Examined:
    """What is known before links are measured."""

    findings: list[Finding]
    there: list[Node]
    """The nodes that answered."""
    linked: bool
    """Whether torch.distributed could reach every one of them from every other."""


def examine(probes: Probes, storage: str, seconds: float) -> Examined:
    """Asks all nodes; one that says nothing for ``seconds`` is a fault, and is asked no more."""
    folders = [*([probes.temporary] if probes.temporary else []), *([storage] if markers.is_local(storage) else [])]
    known, silent = probes.ask(probes.nodes, "facts", lambda node: (folders,), seconds)
    there = list(known)
    found = [
        fault("nodes", f"{node.name} does not answer: {why}",
              "see that its Ray processes run (ray status), and that the suite is installed there; then start it again")
        for node, why in silent.items()
    ]  # fmt: skip
    if not there:
        return Examined(found, there, False)
    if len(probes.nodes) > 1 and not silent:
        found.append(ok("nodes", f"{len(there)} answer: {', '.join(node.name for node in there)}"))
    found += checks.versions(known) + checks.devices(known) + checks.shared_memory(known)
    found += checks.disk(known, probes.temporary) + asking.storage(probes, there, storage)
    linked = True
    if len(there) > 1:
        found += asking.clocks(probes, there)
        told, linked = asking.ports(probes, there)
        found += told
    return Examined(found + asking.wandb(probes, there), there, linked)


Measured = link_workers.Measured | None


def measure(nodes: Sequence[Node], found: Examined, say: Say) -> tuple[list[Finding], Measured, Measured]:
    """Measures links between the nodes that answered: by Ray where there is one, and outside."""
    measured, told = None, []
    if not found.linked:
        told = [
            warning("links", "not measured: not every node that answered reaches every other",
                    "mend what is told of ports and nodes, then look again")
        ]  # fmt: skip
    elif any(node.id for node in nodes):
        measured, told = link_workers.by_ray(found.there, say)
    here = _own(nodes).name
    say(f"measuring outside Ray, between two processes of {here}")
    alone, more = link_workers.alone(here)
    return [*told, *speeds.judged(measured, alone), *more], measured, alone


def _own(nodes: Sequence[Node]) -> Node:
    """Returns the node that this process is on; without Ray the only one."""
    if not any(node.id for node in nodes):
        return nodes[0]
    import ray

    mine = ray.get_runtime_context().get_node_id()
    return next((node for node in nodes if node.id == mine), nodes[0])


def table(findings: Sequence[Finding]) -> Table:
    """Returns the findings for the terminal, each remedy below what it mends."""
    shown = Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for one in findings:
        remedy = f"\n-> {one.remedy}" if one.remedy else ""
        shown.add_row(Text(one.level, COLOURS[one.level]), one.subject, f"{one.found}{remedy}")
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """Returns the last line."""
    faults = sum(one.level == "fault" for one in findings)
    warnings = sum(one.level == "warning" for one in findings)
    if not faults and not warnings:
        return f"{len(findings)} lines, all well"
    return f"{_count(faults, 'fault')}, {_count(warnings, 'warning')} in {len(findings)} lines"


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
