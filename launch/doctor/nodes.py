"""The nodes that are examined, and how questions reach their probes; here, of the machine that is its own only node."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.doctor.probe import Probe


@dataclass(frozen=True)
class Node:
    """One node. ``cpus`` and ``gpus`` are what Ray may give away there; None without Ray."""

    name: str
    """For messages; no two nodes have the same."""
    address: str
    id: str = ""
    cpus: int | None = None
    gpus: int | None = None
    ports: tuple[int, ...] = ()
    """Where Ray's own processes of the node listen."""


Arguments = Callable[[Node], tuple[Any, ...]]
Answers = tuple[dict[Node, Any], dict[Node, str]]
"""What each node answered; and of those that did not, why."""


class Probes(Protocol):
    """A probe on each node."""

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes, in the order of the table."""

    @property
    def temporary(self) -> str:
        """Ray's folder of logs and spilled objects, the same path on every node; empty without Ray."""

    def ask(self, nodes: Sequence[Node], call: str, arguments: Arguments, seconds: float) -> Answers:
        """Calls a method of the probes of some nodes, of all at once, and waits for ``seconds`` at most."""


class Here:
    """This machine alone, without Ray."""

    temporary = ""

    def __init__(self) -> None:
        self.nodes = [Node("this machine", "127.0.0.1")]
        self._probe = Probe("127.0.0.1")

    def ask(self, nodes: Sequence[Node], call: str, arguments: Arguments, seconds: float) -> Answers:
        """Calls in a thread: a share whose server is gone may hold its caller for ever."""
        if not nodes:  # it said nothing before, and is asked no more
            return {}, {}
        (node,) = nodes
        answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((True, getattr(self._probe, call)(*arguments(node))))
            except Exception as error:
                answers.put((False, f"{type(error).__name__}: {error}"))

        threading.Thread(target=answer, daemon=True).start()
        try:
            well, told = answers.get(timeout=seconds)
        except queue.Empty:
            return {}, {node: f"no answer in {seconds:g} s"}
        return ({node: told}, {}) if well else ({}, {node: told})
