"""What is asked of all nodes: is the storage shared, do the clocks agree, are ports open, is wandb there."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from uuid import uuid4

from launch.doctor import markers
from launch.doctor.clocks import Skew, skew
from launch.doctor.finding import Finding, fault, ok, warning
from launch.doctor.nodes import Node, Probes
from launch.doctor.ports import CHOSEN, NODE, OF_RAY, Door
from suite.settings import TrackingSettings
from suite.training.wandb_run import wandb_mode

ANSWER_S = 20.0
"""Seconds for an answer that takes no work of note; a store may repeat a request for ten of them."""

SKEW_LEAST, SKEW_MOST = 1.0, 900.0
"""Seconds. By clocks a second apart the logs of two nodes cannot be read beside each other; a store refuses requests
that were signed a quarter of an hour away from its own time (S3: RequestTimeTooSkewed)."""

WANDB = "https://api.wandb.ai"


def storage(probes: Probes, nodes: Sequence[Node], location: str) -> list[Finding]:
    """Whether all nodes can write to a folder or a store, and each reads what the others wrote."""
    mark = f".doctor-{uuid4().hex[:12]}"
    texts = {node: f"{node.name} {uuid4().hex}" for node in nodes}
    files = {node: f"from-{at}" for at, node in enumerate(nodes)}
    shared = "mount the shared folder there" if markers.is_local(location) else "give that node the store's credentials"
    wrote, silent = probes.ask(nodes, "write", lambda n: (location, mark, files[n], texts[n]), ANSWER_S)
    failed = {**silent, **{node: why for node, why in wrote.items() if why}}
    found = [
        fault("storage", f"{node.name} cannot write to {location}: {why}", f"{shared}, writable for this user")
        for node, why in failed.items()
    ]
    writers = [node for node in nodes if node not in failed]
    expected = {files[node]: texts[node] for node in writers}
    by_file = {files[node]: node.name for node in nodes}
    read, mute = probes.ask(writers, "unread", lambda n: (location, mark, expected), ANSWER_S)
    found += [fault("storage", f"{node.name} cannot read from {location}: {why}", shared) for node, why in mute.items()]
    for node, missing in read.items():
        if missing:
            whose = ", ".join(sorted(by_file[name] for name in missing))
            found.append(
                fault("storage", f"{node.name} does not see in {location} what {whose} wrote: "
                      f"{next(iter(missing.values()))}",
                      "STORAGE must be one folder that all nodes share, or a store such as s3://bucket/runs")
            )  # fmt: skip
    probes.ask(writers, "remove", lambda n: (location, mark), ANSWER_S)
    if found:
        return found
    who = "this node writes and reads" if len(nodes) == 1 else f"{len(nodes)} nodes write, and each reads the others'"
    return [ok("storage", f"{location}: {who}")]


def clocks(probes: Probes, nodes: Sequence[Node]) -> list[Finding]:
    """How far each node's clock is from this process's."""
    found: list[Finding] = []
    seen: dict[Node, Skew] = {}
    for node in nodes:
        try:
            seen[node] = skew(lambda node=node: _clock(probes, node))  # type: ignore[misc]
        except TimeoutError as error:
            found.append(fault("clocks", f"{node.name}: {error}", _gone(node)))
    for node, one in seen.items():
        told = f"{node.name}'s clock is {one}"
        if one.least_s > SKEW_MOST:
            found.append(fault("clocks", told, "set it by NTP (chronyc makestep): stores refuse its requests"))
        elif one.least_s > SKEW_LEAST:
            found.append(warning("clocks", told, "have it kept by NTP (chronyc tracking)"))
    if found or not seen:
        return found
    worst = max(seen.values(), key=lambda one: abs(one.offset_s))
    return [ok("clocks", f"{len(seen)} nodes agree: {worst} at most")]


def _clock(probes: Probes, node: Node) -> float:
    answers, silent = probes.ask([node], "clock", lambda n: (), ANSWER_S)
    if node in silent:
        raise TimeoutError(silent[node])
    return float(answers[node])


def ports(probes: Probes, nodes: Sequence[Node]) -> tuple[list[Finding], bool]:
    """Whether every node reaches every other on fresh ports and on those of Ray; and whether torch.distributed can."""
    opened, silent = probes.ask(nodes, "listen", lambda n: (), ANSWER_S)
    found = [fault("ports", f"{node.name} cannot listen: {why}", _gone(node)) for node, why in silent.items()]
    doors: dict[Node, list[Door]] = {
        node: [*mine, *(Door(NODE, node.address, port) for port in node.ports)] for node, mine in opened.items()
    }
    others = {node: [door for other in doors if other != node for door in doors[other]] for node in doors}
    knocked, mute = probes.ask(list(doors), "knock", lambda n: (others[n],), ANSWER_S)
    found += [
        fault("ports", f"{node.name} does not say whom it reaches: {why}", _gone(node)) for node, why in mute.items()
    ]
    of = {(door.address, door.port): node for node, mine in doors.items() for door in mine}
    closed: defaultdict[tuple[Node, Node], list[tuple[Door, str]]] = defaultdict(list)
    for node, failures in knocked.items():
        for door, why in failures:
            closed[node, of[door.address, door.port]].append((door, why))
    for (here, there), failures in closed.items():
        told = "; ".join(f"{door.use}: port {door.port}, {why}" for door, why in failures)
        found.append(
            fault("ports", f"{here.name} cannot reach {there.name}: {told}",
                  f"open TCP from {here.address} to {there.address} for all ports that processes choose (10002-65535)")
        )  # fmt: skip
    blocked = bool(silent or mute) or any(door.use == CHOSEN for those in closed.values() for door, _ in those)
    if found:
        return found, not blocked
    pairs = len(nodes) * (len(nodes) - 1)
    uses = [CHOSEN, OF_RAY, *([NODE] if any(node.ports for node in nodes) else [])]
    return [ok("ports", f"{len(nodes)} nodes, {pairs} directions, all open: {'; '.join(uses)}")], True


def wandb(probes: Probes, nodes: Sequence[Node]) -> list[Finding]:
    """Whether each node reaches wandb, if runs are sent there: the worker that writes the record may be on any."""
    mode = wandb_mode(TrackingSettings())
    if mode != "online":
        return [ok("wandb", f"{mode}: runs are kept in their folders, no connection is needed")]
    url = os.environ.get("WANDB_BASE_URL", WANDB)
    told, silent = probes.ask(nodes, "web", lambda n: (url,), ANSWER_S)
    failed = {**silent, **{node: why for node, why in told.items() if why}}
    if not failed:
        return [ok("wandb", f"{url} answers on {len(nodes)} node{'s' * (len(nodes) > 1)}")]
    return [
        warning("wandb", f"there is a key, and {node.name} does not reach {url}: {why}",
                "open HTTPS to it, set WANDB_BASE_URL or HTTPS_PROXY, or WANDB_MODE=offline and make sync later")
        for node, why in failed.items()
    ]  # fmt: skip


def _gone(node: Node) -> str:
    return f"see that {node.name} and its Ray processes run: ray status, and its raylet.out"
