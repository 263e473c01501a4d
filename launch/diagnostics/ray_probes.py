"""Probes on the nodes of a Ray cluster: one actor a node that takes no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from launch.backends.ray_init import join, shutdown
from launch.diagnostics.node_probe import NodeProbe
from launch.diagnostics.nodes import Answers, Arguments, Node
from suite.errors import PlacementError


class RayProbes:
    """A context with a probe on every node of the Ray cluster at ``address`` (host:port)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.temporary = ""
        self.cluster = ""
        """The address that the cluster reports."""
        self.nodes: list[Node] = []
        self._probes: dict[Node, Any] = {}

    def __enter__(self) -> RayProbes:
        """Raises PlacementError when no cluster answers, or one with another Ray or Python version."""
        connect(self.address)
        import ray

        self.cluster = str(ray.get_runtime_context().gcs_address)
        self.temporary = str(ray._private.worker.global_worker.node.get_temp_dir_path())  # type: ignore[union-attr]
        self.nodes = alive(ray.nodes())  # type: ignore[no-untyped-call]
        for node in self.nodes:
            self._probes[node] = ray.remote(NodeProbe).options(**pinned(node), num_cpus=0).remote(node.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:

        self._probes.clear()
        shutdown()

    def ask(self, nodes: Sequence[Node], call: str, arguments: Arguments, seconds: float) -> Answers:
        """Calls the actors; returns the reason for each that does not answer."""
        calls = {node: getattr(self._probes[node], call).remote(*arguments(node)) for node in nodes}
        return collect(calls, seconds)


Key = TypeVar("Key")


def collect(calls: dict[Key, Any], seconds: float) -> tuple[dict[Key, Any], dict[Key, str]]:
    """Returns the results of running calls after at most ``seconds``, and the reason for each without a result."""
    import ray

    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds) if calls else ([], [])
    done = set(ready)
    answers: dict[Key, Any] = {}
    unanswered: dict[Key, str] = {}
    for key, call in calls.items():
        if call not in done:
            unanswered[key] = f"no answer in {seconds:g} s"
            continue
        try:
            answers[key] = ray.get(call, timeout=seconds)
        except Exception as error:
            unanswered[key] = str(error).strip().splitlines()[-1].strip()
    return answers, unanswered


def pinned(node: Node) -> dict[str, Any]:
    """Returns the options of an actor that runs only on ``node``."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False), "max_restarts": 0}


def connect(address: str) -> None:
    """Connects to the Ray cluster at ``host:port``. Raises PlacementError, as ``join`` does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"ADDRESS={address} is not the address of a Ray cluster: use host:port, such as head:6379")
    join(address, "leave ADDRESS out to check only this machine")


def alive(ray_nodes: Sequence[dict[str, Any]]) -> list[Node]:
    """Returns the nodes that Ray reports as alive, the head first, each with a unique name: host, address, or id."""
    alive_nodes = [node for node in ray_nodes if node["Alive"]]
    hosts = Counter(node["NodeManagerHostname"] for node in alive_nodes)
    addresses = Counter(node["NodeManagerAddress"] for node in alive_nodes)

    def name(node: dict[str, Any]) -> str:
        if hosts[node["NodeManagerHostname"]] == 1:
            return str(node["NodeManagerHostname"])
        if addresses[node["NodeManagerAddress"]] == 1:
            return str(node["NodeManagerAddress"])
        return f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"

    alive_nodes.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], name(node)))
    return [
        Node(
            name(node), node["NodeManagerAddress"], node["NodeID"], int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)), (node["NodeManagerPort"], node["ObjectManagerPort"]),
        )
        for node in alive_nodes
    ]  # fmt: skip
