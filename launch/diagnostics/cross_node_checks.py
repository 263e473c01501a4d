"""Checks across nodes: shared storage, clocks, ports and the connection to wandb."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from uuid import uuid4

from experiments.base.hints import command
from launch import node_probe
from launch.diagnostics.clocks import Skew, skew
from launch.diagnostics.finding import Finding, count_of, fault, ok, warning
from launch.diagnostics.ports import CHOSEN, NODE, OF_RAY, Endpoint, connect_check, listen, web_check
from launch.diagnostics.probes import Node, Probes
from suite.paths import hide_secrets
from suite.settings import TrackingSettings
from suite.training.wandb_run import PUBLIC, wandb_mode

ANSWER_S = 20.0
"""Seconds for a quick answer; a store may retry a request for ten of them."""

SKEW_LEAST, SKEW_MOST = 1.0, 900.0
"""Seconds. With clocks a second apart the logs of two nodes cannot be compared; a store refuses requests signed more
than 15 minutes off its own time (S3: RequestTimeTooSkewed)."""


def storage(probes: Probes, nodes: Sequence[Node], location: str) -> list[Finding]:
    """Checks that all nodes can write to a folder or store, and that each reads what the others wrote."""
    shown, mark = hide_secrets(location), f".doctor-{uuid4().hex[:12]}"
    markers = {node: f"{mark}-{at}" for at, node in enumerate(nodes)}
    remedy = "mount the shared folder there"
    if not node_probe.folder_of(location):
        remedy = "give that node the store's credentials"
    answers, failed = probes.ask(nodes, node_probe.write_marker, lambda n: (location, markers[n]), ANSWER_S)
    failed |= {node: why for node, why in answers.items() if why}
    found = [
        fault("storage", f"{node.name} cannot write to {shown}: {why}", f"{remedy}, writable for this user")
        for node, why in failed.items()
    ]
    writers = [node for node in nodes if node not in failed]
    writer_of = {markers[node]: node.name for node in writers}
    question = (location, list(writer_of), node_probe.SETTLE_S)
    answers, unread = probes.ask(writers, node_probe.unseen_markers, lambda n: question, ANSWER_S)
    found += [fault("storage", f"{node.name} cannot read from {shown}: {why}", remedy) for node, why in unread.items()]
    for node, unseen in answers.items():
        if unseen:
            whose = ", ".join(sorted(writer_of[marker] for marker in unseen))
            text = f"{node.name} does not see in {shown} what {whose} wrote"
            remedy = "STORAGE must be one folder shared by all nodes"
            found.append(fault("storage", text, remedy))
    probes.ask(writers, node_probe.remove_markers, lambda n: (location, list(markers.values())), ANSWER_S)
    if found:
        return found
    who = "this node writes and reads" if len(nodes) == 1 else f"{len(nodes)} nodes write, and each reads the others'"
    return [ok("storage", f"{shown}: {who}")]


def clocks(probes: Probes, nodes: Sequence[Node]) -> list[Finding]:
    """Checks each node's clock against this process's."""
    found: list[Finding] = []
    skews: dict[Node, Skew] = {}
    for node in nodes:
        try:
            skews[node] = skew(partial(_clock, probes, node))
        except TimeoutError as error:
            found.append(fault("clocks", f"{node.name}: {error}", _node_gone(node)))
    for node, clock_skew in skews.items():
        text = f"{node.name}'s clock is {clock_skew}"
        if clock_skew.least_s > SKEW_MOST:
            found.append(fault("clocks", text, "set it by NTP (chronyc makestep): stores refuse its requests"))
        elif clock_skew.least_s > SKEW_LEAST:
            found.append(warning("clocks", text, "keep it in sync by NTP (chronyc tracking)"))
    if found:
        return found
    worst = max(skews.values(), key=lambda clock_skew: abs(clock_skew.offset_s))
    return [ok("clocks", f"{len(skews)} nodes agree: at most {worst}")]


def _clock(probes: Probes, node: Node) -> float:
    answers, silent = probes.ask([node], time.time, lambda n: (), ANSWER_S)
    if node in silent:
        raise TimeoutError(silent[node])
    return float(answers[node])


def ports(probes: Probes, nodes: Sequence[Node]) -> tuple[list[Finding], bool]:
    """Checks that every node reaches every other on new ports and on Ray's; also returns whether torch.distributed
    can connect all of them."""
    opened, silent = probes.ask(nodes, listen, lambda n: (n.address,), ANSWER_S)
    found = [fault("ports", f"{node.name} cannot listen: {why}", _node_gone(node)) for node, why in silent.items()]
    endpoints: dict[Node, list[Endpoint]] = {
        node: [*own, *(Endpoint(NODE, node.address, port) for port in node.ports)] for node, own in opened.items()
    }
    others = {
        node: [(other, endpoint) for other in endpoints if other != node for endpoint in endpoints[other]]
        for node in endpoints
    }
    reports, unread = probes.ask(list(endpoints), connect_check, lambda n: (others[n],), ANSWER_S)
    found += [
        fault("ports", f"{node.name} does not report which nodes it reaches: {why}", _node_gone(node))
        for node, why in unread.items()
    ]
    for node, failures in reports.items():
        for other, closed in groupby(failures, key=itemgetter(0)):
            text = "; ".join(f"{endpoint.use}: port {endpoint.port}, {why}" for _, endpoint, why in closed)
            remedy = f"open TCP from {node.address} to {other.address} on all ports from 10002 to 65535"
            found.append(fault("ports", f"{node.name} cannot reach {other.name}: {text}", remedy))
    if found:
        closed_uses = {endpoint.use for failures in reports.values() for _, endpoint, _ in failures}
        return found, not (silent or unread or CHOSEN in closed_uses)
    pairs = len(nodes) * (len(nodes) - 1)
    uses = [CHOSEN, OF_RAY, *([NODE] if any(node.ports for node in nodes) else [])]
    return [ok("ports", f"{len(nodes)} nodes, {pairs} directions, all open: {'; '.join(uses)}")], True


def wandb(probes: Probes, nodes: Sequence[Node]) -> list[Finding]:
    """Checks that each node reaches wandb if runs are uploaded: the worker that does so may be on any node."""
    mode = wandb_mode(TrackingSettings())
    if mode != "online":
        return [ok("wandb", f"{mode}: runs stay in their folders, no connection is needed")]
    url = os.environ.get("WANDB_BASE_URL") or PUBLIC
    shown = hide_secrets(url)
    _, failed = probes.ask(nodes, web_check, lambda n: (url,), ANSWER_S)
    if not failed:
        return [ok("wandb", f"{shown} answers on {count_of(len(nodes), 'node')}")]
    offline = f"WANDB_MODE=offline and {command('sync')} later"
    remedy = f"allow HTTPS to it, set WANDB_BASE_URL or HTTPS_PROXY, or use {offline}"
    return [
        warning("wandb", f"a key is set, but {node.name} does not reach {shown}: {why}", remedy)
        for node, why in failed.items()
    ]


def _node_gone(node: Node) -> str:
    return f"check that {node.name} and its Ray processes run: see ray status and its raylet.out"
