"""A connection to Ray: to the cluster of RAY_ADDRESS, or to a local Ray that starts and ends with the connection."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from launch.backends.ray_init import init, join, shutdown
from launch.ray_nodes import alive_nodes
from suite.cgroups import cpu_limit
from suite.errors import PlacementError, WorkerError, first_line
from suite.pipeline.planning.placement import Node

ANSWER_S = 2.0
"""Seconds in which a live node accepts a connection."""

POLL_S = 0.25
"""Seconds between two looks at what a run waits for."""

START_DEADLINE = 180
"""Seconds for all actors to start."""


def address() -> str | None:
    """Returns the requested cluster's address; None for a local Ray."""
    return os.environ.get("RAY_ADDRESS") or None


class Connection:
    """Connects on first use, and again after ``close``."""

    def __init__(self, workers: int = 1) -> None:
        """A local Ray gets room for so many workers, even if they must share cores."""
        self.connected = False
        self.left_out: dict[str, str] = {}
        """Nodes that a run does not use, by id: their names, and why."""
        self._workers = workers

    def open(self) -> None:
        """Connects. Raises PlacementError when nothing answers at RAY_ADDRESS, or this Ray cannot join the cluster."""
        if self.connected:
            return
        if (requested := address()) is not None:
            join(requested, "unset RAY_ADDRESS to use this machine")
        else:  # more stages than cores are allowed: they share cores, and the plan reports it
            init(address="local", num_cpus=max(cpu_limit(), self._workers), include_dashboard=False)
        self.connected = True

    def close(self) -> None:
        """Disconnects, which ends everything that was started over this connection. One of the user's own stays."""
        if self.connected:
            shutdown()
        self.connected = False

    def kind(self) -> Literal["GPU", "CPU"]:
        """Returns the kind of the cluster's devices: GPUs if it has any, even if their nodes do not answer now."""
        self.open()
        return "GPU" if any(node["Resources"].get("GPU") for node in alive_nodes()) else "CPU"

    def nodes(self, kind: str) -> list[Node]:
        """Returns the nodes with devices of a kind, ``GPU`` or ``CPU``, that are alive and answer."""
        return self.nodes_and_silent(kind)[0]

    def nodes_and_silent(self, kind: str) -> tuple[list[Node], list[Node]]:
        """Returns the nodes with devices of a kind that answer, and those that do not answer but that Ray still counts
        as alive. Ray needs up to half a minute to notice a lost machine."""
        self.open()
        free = available_resources_per_node()  # type: ignore[no-untyped-call]
        offering = [node for node in alive_nodes() if int(node["Resources"].get(kind, 0))]
        counted = [node for node in offering if node["NodeID"] not in self.left_out]
        nodes = [
            Node(
                node["NodeID"],
                f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
                int(free.get(node["NodeID"], {}).get(kind, 0)),
                int(node["Resources"][kind]),
            )
            for node in counted
        ]
        answers = dict(zip(nodes, _answers(counted), strict=True))
        return [node for node in nodes if answers[node]], [node for node in nodes if not answers[node]]

    def name(self) -> str:
        """Returns the cluster's own address (GCS), which does not depend on how it was reached."""
        self.open()
        return str(ray.get_runtime_context().gcs_address)

    def lost_nodes(self, nodes: set[str]) -> set[str]:
        """Returns the ids of the given nodes that are lost: dead according to Ray, or not answering."""
        known = [node for node in alive_nodes() if node["NodeID"] in nodes]
        return nodes - {node["NodeID"] for node, answers in zip(known, _answers(known), strict=True) if answers}


def _answers(nodes: Sequence[dict[str, Any]]) -> list[bool]:
    """Returns for each node whether its Ray process accepts a connection. All are tried at once: many may be silent."""

    def answers(node: dict[str, Any]) -> bool:
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=ANSWER_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        return list(pool.map(answers, nodes))


Found = TypeVar("Found")


def wait_for_devices(find: Callable[[], Found], timeout_s: float, log: Callable[[str], None], remedy: str) -> Found:
    """Returns what ``find`` returns once it raises no PlacementError, which says what is missing. Raises the last one,
    with the ``remedy``, after ``timeout_s``."""
    until, logged = time.monotonic() + timeout_s, False
    while True:
        try:
            return find()
        except PlacementError as error:
            if time.monotonic() > until:
                raise type(error)(f"{error}; waited {timeout_s:.0f} s for them{remedy}") from None
            if not logged:
                log(f"{error}; waiting for them, at most {timeout_s:.0f} s")
                logged = True
        time.sleep(POLL_S)


@contextmanager
def answering(what: str) -> Iterator[None]:
    """A context that converts the errors of a cluster that does not answer to WorkerError."""
    try:
        yield
    except (RayError, ConnectionError, TimeoutError) as error:
        raise WorkerError(
            f"could not ask Ray {what}: {first_line(error)}; check that its head is running, and resume"
        ) from error
