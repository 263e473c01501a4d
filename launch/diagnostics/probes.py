"""The nodes to examine, and a probe on each: a process that calls functions there."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any

from experiments.base.hints import option
from launch.backends.ray_init import join, shutdown
from launch.ray_nodes import alive_nodes, collect, reason, start_on
from suite.errors import PlacementError


@dataclass(frozen=True)
class Host:
    """One node of a cluster. ``cpus`` and ``gpus`` are what Ray offers there; None without Ray."""

    name: str
    """Unique, for messages."""
    address: str
    id: str = ""
    cpus: int | None = None
    gpus: int | None = None


Arguments = Callable[[Host], tuple[Any, ...]]
Answers = tuple[dict[Host, Any], dict[Host, str]]
"""The answer of each node, and the reason for each node that did not answer."""


class LocalProbe:
    """This machine alone, without Ray."""

    nodes: Sequence[Host] = (Host("this machine", "127.0.0.1"),)
    """All nodes, in the order of the table."""
    cluster = "this machine"
    """The address that the cluster reports."""

    def ask(self, nodes: Sequence[Host], function: Callable[..., Any], arguments: Arguments, seconds: float) -> Answers:
        """Calls a function on these nodes concurrently and waits at most ``seconds``; here in a daemon thread, because
        access to a network share whose server is gone may block for ever."""
        if not nodes:  # it did not answer an earlier call
            return {}, {}
        (node,) = nodes
        with ThreadPool(1) as thread:
            try:
                return {node: thread.apply_async(function, arguments(node)).get(seconds)}, {}
            except multiprocessing.TimeoutError:
                return {}, {node: f"no answer in {seconds:g} s"}
            except Exception as error:
                return {}, {node: reason(error)}


class _Probe:
    """A Ray actor on a node."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class RayProbes:
    """A probe on every node of a Ray cluster, which takes no device."""

    def __init__(self, address: str) -> None:
        """Joins the cluster at ``host:port``. Raises PlacementError for another form of address, and as ``join``
        does."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise PlacementError(
                f"{option('ADDRESS', address)} is not the address of a Ray cluster: use host:port, such as head:6379"
            )
        join(address, "leave ADDRESS out to check only this machine")
        import ray

        self.cluster = str(ray.get_runtime_context().gcs_address)
        self.nodes = _named_nodes(alive_nodes())
        self._probes = {node: start_on(node.id, _Probe) for node in self.nodes}

    def close(self) -> None:
        self._probes.clear()
        shutdown()

    def ask(self, nodes: Sequence[Host], function: Callable[..., Any], arguments: Arguments, seconds: float) -> Answers:
        return collect({node: self._probes[node].call.remote(function, *arguments(node)) for node in nodes}, seconds)


Probes = LocalProbe | RayProbes


def _named_nodes(records: list[dict[str, Any]]) -> list[Host]:
    """Returns the nodes of Ray's records, the head first, each with a unique name: host, address, or id."""
    hosts = Counter(node["NodeManagerHostname"] for node in records)
    addresses = Counter(node["NodeManagerAddress"] for node in records)

    def name(node: dict[str, Any]) -> str:
        host, address = str(node["NodeManagerHostname"]), str(node["NodeManagerAddress"])
        if hosts[host] == 1:
            return host
        return address if addresses[address] == 1 else f"{address}/{node['NodeID'][:6]}"

    records.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], name(node)))
    return [
        Host(
            name(node),
            node["NodeManagerAddress"],
            node["NodeID"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in records
    ]
