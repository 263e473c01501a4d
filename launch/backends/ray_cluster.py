"""Ray backends: find a cluster's devices, measure layer costs on them, and start workers with Ray Train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.base.cluster import MOST_KINDS, Cluster, of_kinds
from experiments.base.hints import command
from launch.backends.backend import Backend, Result
from launch.backends.link_cache import read_links
from launch.backends.ray_connection import Connection, address, answering, wait_for_devices
from launch.backends.ray_train import RayTrainLauncher
from launch.ray_nodes import run_on_all
from launch.runs.store import CACHE
from launch.storage_sync.data_transfer import send_folder
from launch.supervision.supervisor import Launcher
from launch.worker.attempt import Attempt, run_logger
from launch.worker.devices import cores, cpu_model, gpus
from suite.cgroups import cpu_quota
from suite.errors import BusyError, PlacementError
from suite.log import Log
from suite.pipeline.planning.placement import Node, Placement

FACTS_TIMEOUT_S = 60.0
"""Seconds to query one node's devices; includes the start of a Ray worker process."""

MEASURING_S = 300.0
"""Seconds for measurements on a node; before that, the same time to wait for its devices to be free."""


class RayBackend(Backend):
    """This machine; its workers are started by a local Ray that belongs to the run."""

    def open_launcher(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        return RayTrainLauncher(Connection(attempt.workers), attempt, planned, run_logger(attempt.run.messages))


class RayClusterBackend(Backend):
    """The cluster of RAY_ADDRESS. Its devices are its GPUs if it has any, otherwise its CPUs."""

    def __init__(self) -> None:
        self._connection = Connection()
        self._devices: dict[str, Cluster] = {}
        """Devices of each node, by node id."""

    def cluster(self) -> Cluster:
        """Returns the devices of the nodes that answer, free or busy.

        Raises PlacementError when the cluster does not answer or has no devices.
        """
        with answering("which devices it has"):
            kind = self._connection.kind()
            nodes = tuple(replace(node, free=node.total) for node in self._connection.nodes(kind))
            if not nodes:
                raise PlacementError(f"the Ray cluster at {address()} has no node with a device; add one")
            name = self._connection.name()
        new = [node for node in nodes if node.id not in self._devices]
        found = run_on_all(new, _node_devices, kind, limit_s=FACTS_TIMEOUT_S, fault=_no_answer)
        self._devices |= {node.id: _as_offered(devices, quota, node) for node, (devices, quota) in found.items()}
        names = {node.id: self._devices[node.id].name for node in nodes}
        self._connection.device_names |= names
        nodes = tuple(replace(node, device=names[node.id]) for node in nodes)
        links = read_links(CACHE, name)

        def of_nodes(own: Sequence[Node]) -> Cluster:
            return replace(
                min((self._devices[node.id] for node in own), key=lambda devices: devices.bytes_per_device),
                devices=sum(node.total for node in own),
                nodes=tuple(own),
                network=links.between_nodes if links else None,
                reduction=links.all_reduce if links else None,
                has_bf16=all(self._devices[node.id].has_bf16 for node in own),
            )

        kinds = dict.fromkeys(names.values())
        if len(kinds) > MOST_KINDS:
            return of_nodes(nodes)
        return of_kinds([of_nodes([node for node in nodes if node.device == kind]) for kind in kinds])

    def open_launcher(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        return RayTrainLauncher(self._connection, attempt, planned, run_logger(attempt.run.messages))

    def close(self) -> None:
        self._connection.close()

    def on_free_devices(
        self, task: Callable[[], Result], cluster: Cluster, devices: int, log: Log, data: Path | None = None
    ) -> Result:
        """On the node of the cluster's kind that has the most free devices, in at most MEASURING_S."""
        ids = {node.id for node in cluster.nodes if node.device == cluster.name}

        def find() -> Node:
            nodes = [node for node in self._connection.nodes(cluster.kind.upper()) if node.id in ids]
            node = max(nodes, key=lambda node: node.free, default=None)
            if node is not None and node.free >= devices:
                return node
            available = f"{node.free} are free on {node.name}, the most of these nodes" if node else "no node answers"
            raise BusyError(f"measuring needs {devices} devices on one node, and {available}")

        node = wait_for_devices(find, MEASURING_S, log, "; try again when devices are free")
        if data is not None:
            send_folder(data, [node])
        needed: dict[str, Any] = {f"num_{cluster.kind}s": devices}
        late = f"no result in {MEASURING_S:g} s: it hangs, or its devices have just become busy"
        found = run_on_all([node], _call, task, limit_s=MEASURING_S, fault=_no_answer, late=late, **needed)
        result: Result = found[node]
        return result


def _node_devices(kind: str) -> tuple[Cluster, float]:
    """Returns the devices of the node that this runs on, and its CPU quota in cores."""
    return gpus() if kind == "GPU" else replace(cores(), name=cpu_model()), cpu_quota()


def _as_offered(devices: Cluster, quota: float, node: Node) -> Cluster:
    """Returns a node's devices; of cores as many as Ray offers there, which share the memory and the node's quota.
    Cores with different shares of one, to 5%, are different devices."""
    if devices.kind == "gpu":
        return devices
    percent = max(5, 5 * round(20 * min(1.0, quota / node.total)))
    share = f", {percent}% of a core" if percent < 100 else ""
    each = devices.devices * devices.bytes_per_device // node.total
    return replace(devices, bytes_per_device=each, name=devices.name + share)


def _call(task: Callable[[], Result]) -> Result:
    """A Ray task, which only a plain function can be."""
    return task()


def _no_answer(node: Node, why: str) -> PlacementError:
    return PlacementError(f"node {node.name} gave no result: {why}; run `{command('doctor')}`, or try again")
