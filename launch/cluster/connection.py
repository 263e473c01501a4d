"""One connection to Ray: the cluster of RAY_ADDRESS, or one started here and ended with it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Literal

from launch.cluster.causes import first_line
from launch.cluster.joining import init, join
from launch.jobs import secrets
from launch.limits import cores
from suite.errors import WorkerError
from suite.pipeline.placement import Node

ANSWER_S = 2.0
"""Seconds in which a node that is there takes a connection."""

END_S = 15.0
"""Seconds that Ray may take to see that a worker was ended."""


def address() -> str | None:
    """Returns the cluster that is asked for; None for a Ray of this run's own, on this machine."""
    return os.environ.get("RAY_ADDRESS") or None


class Connection:
    """Connected at the first question, and again after ``close``."""

    def __init__(self) -> None:
        self._connected = False
        self._workers = 1
        """The most that a Ray of this machine was to have room for."""
        self._keeper: object | None = None

    @property
    def connected(self) -> bool:
        """Whether Ray can be asked without a wait."""
        return self._connected

    def open(self, workers: int = 1) -> None:
        """Connects. A Ray of this machine gets room for ``workers``: more of them than cores take turns.

        Raises PlacementError when nothing answers at RAY_ADDRESS, or it is no cluster that this Ray can join.
        """
        self._workers = max(self._workers, workers)
        if self._connected:
            return
        _connect(self._workers)
        self._keeper = secrets.hand_out()
        self._connected = True

    def close(self) -> None:
        """Disconnects, which ends all that was started over this connection."""
        import ray

        self._keeper = None
        ray.shutdown()
        self._connected = False

    def kind(self) -> Literal["GPU", "CPU"]:
        """Returns what the cluster's devices are: GPUs if it has any, whether or not their nodes answer just now."""
        import ray

        self.open()
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"

    def nodes(self, kind: str) -> list[Node]:
        """Returns the nodes with devices of a kind, ``GPU`` or ``CPU``, that are alive and answer."""
        return self.nodes_and_silent(kind)[0]

    def nodes_and_silent(self, kind: str) -> tuple[list[Node], list[Node]]:
        """Returns the nodes with devices of a kind that answer, and those that do not and that Ray counts still: it
        takes up to half a minute to see that a machine is gone."""
        import ray
        from ray._private.state import available_resources_per_node

        self.open()
        free = available_resources_per_node()  # type: ignore[no-untyped-call]
        counted = [node for node in ray.nodes() if node["Alive"] and int(node["Resources"].get(kind, 0))]  # type: ignore[no-untyped-call]
        found: tuple[list[Node], list[Node]] = [], []
        for node, answers in zip(counted, _answers(counted), strict=True):
            total, left = (int(one.get(kind, 0)) for one in (node["Resources"], free.get(node["NodeID"], {})))
            found[0 if answers else 1].append(Node(node["NodeID"], _name(node), left, total))
        return found

    def name(self) -> str:
        """Returns the address by which the cluster knows itself, however it was reached."""
        import ray

        self.open()
        return str(ray.get_runtime_context().gcs_address)

    def lost(self, nodes: Iterable[str]) -> set[str]:
        """Returns which of some nodes are gone, be it that Ray has noticed or that they answer no more."""
        import ray

        asked = set(nodes)
        known = [one for one in ray.nodes() if one["NodeID"] in asked and one["Alive"]]  # type: ignore[no-untyped-call]
        return asked - {one["NodeID"] for one, answers in zip(known, _answers(known), strict=True) if answers}

    def end_controller(self) -> None:
        """Ends Ray Train's controller of this driver, which stands on the driver's own machine; who waits for it here
        waits no more."""
        import ray
        from ray._private.state import actors

        job = ray.get_runtime_context().get_job_id()
        for actor in actors(actor_state_name="ALIVE").values():
            if actor["JobID"] == job and actor["ActorClassName"] == "TrainController":
                with suppress(ProcessLookupError):
                    os.kill(actor["Pid"], signal.SIGKILL)


def _name(node: dict[str, Any]) -> str:
    """Returns what a person knows a node by: its host's name where that says which, otherwise its address."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _answers(nodes: Sequence[dict[str, Any]]) -> list[bool]:
    """Returns of each node whether its own Ray process can be reached. All are asked at once: many that are silent
    take no longer than one."""

    def answers(node: dict[str, Any]) -> bool:
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=ANSWER_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        return list(pool.map(answers, nodes))


def _connect(workers: int) -> None:
    asked = address()
    if asked is not None:
        join(asked, "unset RAY_ADDRESS to use this machine")
        return
    # more stages than cores are allowed here: they take turns, and the plan says so
    init(address="local", num_cpus=max(cores(), workers), include_dashboard=False)


@contextmanager
def answering(what: str) -> Iterator[None]:
    """A context in which a cluster that does not answer is one sentence. Raises WorkerError."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, ConnectionError, TimeoutError) as error:
        raise WorkerError(
            f"Ray could not say {what}: {first_line(error)}; see that its head runs, and resume"
        ) from error
