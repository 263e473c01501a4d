"""Ray backends: find a cluster's devices, measure layer costs on them, and start workers by StageActors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.base.cluster import Cluster
from experiments.base.hints import command
from launch.backends.backend import Backend, Result
from launch.backends.link_cache import read_links
from launch.backends.ray_connection import Connection, address, answering, wait_for_devices
from launch.backends.ray_launcher import RayLauncher
from launch.backends.shared_folder import check_shared
from launch.ray_nodes import cancel, collect, run_on_all, start_on
from launch.runs.store import CACHE
from launch.supervision.supervisor import Launcher
from launch.worker.attempt import Attempt, run_logger
from launch.worker.devices import cores, cpu_model, gpus
from launch.worker.peak import declared_peak
from suite.errors import BusyError, PlacementError
from suite.log import Log
from suite.pipeline.planning.placement import Node, Placement

FACTS_TIMEOUT_S = 120.0
"""Seconds to query one node's devices; includes the start of a Ray worker process."""

MEASURING_S = 300.0
"""Seconds for measurements on a node; before that, the same time to wait for its devices to be free."""


class RayBackend(Backend):
    """This machine; its workers are started by a local Ray that belongs to the run."""

    def open_launcher(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        return RayLauncher(Connection(attempt.workers), attempt, planned, run_logger(attempt.run.messages))


class RayClusterBackend(Backend):
    """The cluster of RAY_ADDRESS. Its devices are its GPUs if it has any, otherwise its CPUs."""

    def __init__(self) -> None:
        self._connection = Connection()
        self._devices: dict[str, Cluster] = {}
        """Devices of each node, by node id."""

    def cluster(self) -> Cluster:
        """Returns the devices of the nodes that answer, free or busy, and leaves out the others. If they differ, all
        count as the slowest of them (``_speed``), with the smallest memory.

        Raises PlacementError when the cluster does not answer or has no devices.
        """
        with answering("which devices it has"):
            kind = self._connection.kind()
            nodes = tuple(replace(node, free=node.total) for node in self._connection.nodes(kind))
            if not nodes:
                left_out = "; ".join(["", *self._connection.left_out.values()])
                raise PlacementError(f"the Ray cluster at {address()} has no node with a device; add one{left_out}")
            name = self._connection.name()
        new = [node for node in nodes if node.id not in self._devices]
        asked = {node: start_on(node.id, _node_devices, kind, max_retries=0) for node in new}
        found, silent = collect(asked, FACTS_TIMEOUT_S)
        self._devices |= {node.id: _as_offered(devices, node) for node, devices in found.items()}
        nodes = tuple(node for node in nodes if node not in silent)
        for node, why in silent.items():
            cancel(asked[node])
            if not nodes:
                raise _no_answer(node, why)
            self._connection.left_out[node.id] = f"{node.name}, which gave no result: {why}"
        of_nodes = [self._devices[node.id] for node in nodes]
        slowest = min(of_nodes, key=_speed)
        names = tuple(dict.fromkeys(devices.name for devices in of_nodes))
        links = read_links(CACHE, name)
        return replace(
            slowest,
            devices=sum(node.total for node in nodes),
            bytes_per_device=min(devices.bytes_per_device for devices in of_nodes),
            nodes=nodes,
            network=links.between_nodes if links else None,
            reduction=links.all_reduce if links else None,
            device_names=names if len(names) > 1 else (),
            left_out=tuple(self._connection.left_out.values()),
        )

    def prepare_processes(self, preload: Sequence[str] = ()) -> None:
        """Does nothing: another machine starts them."""

    def open_launcher(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        return RayLauncher(self._connection, attempt, planned, run_logger(attempt.run.messages))

    def close(self) -> None:
        self._connection.close()

    def on_free_devices(
        self, task: Callable[[], Result], cluster: Cluster, devices: int, log: Log, data: Path | None = None
    ) -> Result:
        """On a node with the devices that all count as, the one with the most free, in at most MEASURING_S."""
        ids = {node.id for node in cluster.nodes if self._devices[node.id].name == cluster.name}

        def find() -> Node:
            nodes = [node for node in self._connection.nodes(cluster.kind.upper()) if node.id in ids]
            node = max(nodes, key=lambda node: node.free, default=None)
            if node is not None and node.free >= devices:
                return node
            available = f"{node.free} are free on {node.name}, the most of these nodes" if node else "no node answers"
            raise BusyError(f"measuring needs {devices} devices on one node, and {available}")

        node = wait_for_devices(find, MEASURING_S, log, "; try again when devices are free")
        if data is not None:
            check_shared([node], [], data)
        needed: dict[str, Any] = {f"num_{cluster.kind}s": devices}
        late = f"no result in {MEASURING_S:g} s: it hangs, or its devices have just become busy"
        found = run_on_all([node], _call, task, limit_s=MEASURING_S, fault=_no_answer, late=late, **needed)
        result: Result = found[node]
        return result


def _speed(devices: Cluster) -> tuple[bool, float, int]:
    """Returns a key by which slower devices come first: those without bf16, then by the peak declared for their name,
    then by their memory. An unknown name, such as a processor's, has no peak."""
    peak = declared_peak(devices.name, "bf16")
    return devices.has_bf16, peak.flops_per_s if peak else math.inf, devices.bytes_per_device


def _node_devices(kind: str) -> Cluster:
    """Returns the devices of the node that this runs on."""
    return gpus() if kind == "GPU" else replace(cores(), name=cpu_model())


def _as_offered(devices: Cluster, node: Node) -> Cluster:
    """Returns a node's devices; of cores as many as Ray offers there, which share the memory."""
    if devices.kind == "gpu":
        return devices
    return replace(devices, bytes_per_device=devices.devices * devices.bytes_per_device // node.total)


def _call(task: Callable[[], Result]) -> Result:
    """A Ray task, which only a plain function can be."""
    return task()


def _no_answer(node: Node, why: str) -> PlacementError:
    return PlacementError(f"node {node.name} gave no result: {why}; run `{command('doctor')}`, or try again")
