"""The nodes to examine and the interface of their probes; also the probe of a single machine without Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.diagnostics.node_probe import NodeProbe


@dataclass(frozen=True)
class Node:
    """One node. ``cpus`` and ``gpus`` are what Ray offers there; None without Ray."""

    name: str
    """Unique, for messages."""
    address: str
    id: str = ""
    cpus: int | None = None
    gpus: int | None = None
    ports: tuple[int, ...] = ()
    """The ports of Ray's own processes on the node."""


Arguments = Callable[[Node], tuple[Any, ...]]
Answers = tuple[dict[Node, Any], dict[Node, str]]
"""The answer of each node, and the reason for each node that did not answer."""


class Probes(Protocol):
    """A probe on each node."""

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes, in the order of the table."""

    @property
    def temporary(self) -> str:
        """Ray's folder of logs and spilled objects, the same path on every node; empty without Ray."""

    def ask(self, nodes: Sequence[Node], call: str, arguments: Arguments, seconds: float) -> Answers:
        """Calls a method of the probes of these nodes concurrently and waits at most ``seconds``."""


class LocalProbe:
    """This machine alone, without Ray."""

    temporary = ""

    def __init__(self) -> None:
        self.nodes = [Node("this machine", "127.0.0.1")]
        self._probe = NodeProbe("127.0.0.1")

    def ask(self, nodes: Sequence[Node], call: str, arguments: Arguments, seconds: float) -> Answers:
        """Calls the probe in a thread: access to a network share whose server is gone may block for ever."""
        if not nodes:  # it did not answer an earlier call
            return {}, {}
        (node,) = nodes
        answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def call_probe() -> None:
            try:
                answers.put((True, getattr(self._probe, call)(*arguments(node))))
            except Exception as error:
                answers.put((False, f"{type(error).__name__}: {error}"))

        threading.Thread(target=call_probe, daemon=True).start()
        try:
            succeeded, result = answers.get(timeout=seconds)
        except queue.Empty:
            return {}, {node: f"no answer in {seconds:g} s"}
        return ({node: result}, {}) if succeeded else ({}, {node: result})
