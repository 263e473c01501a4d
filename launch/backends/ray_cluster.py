"""Ray backends: find a cluster's devices, measure layer costs on them, and start workers with Ray Train."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.base.cluster import Cluster
from experiments.base.hints import command
from experiments.base.workload import Measurable
from launch.backends.backend import Backend, measure_here
from launch.backends.link_cache import read_links
from launch.backends.ray_connection import Connection, address, answering, wait_for_devices
from launch.backends.ray_train import RayTrainLauncher
from launch.ray_nodes import reason, start_on
from launch.runs.store import CACHE
from launch.storage_sync.data_transfer import send_folder
from launch.supervision.supervisor import Launcher
from launch.worker.attempt import Attempt, run_logger
from launch.worker.devices import cpu_model, gpus, this_machine
from launch.worker.measure import LayerMeasurements
from suite.errors import BusyError, PlacementError
from suite.log import Log
from suite.pipeline.planning.devices import Device, this_device
from suite.pipeline.planning.placement import Node, Placement

FACTS_TIMEOUT_S = 60.0
"""Seconds to query one node's devices; includes the start of a Ray worker process."""

MEASURING_S = 300.0
"""Seconds for measuring layers on a node; before that, the same time to wait for its devices to be free."""


class RayBackend(Backend):
    """This machine; its workers are started by a local Ray that belongs to the run."""

    def __init__(self) -> None:
        self._connection = Connection()

    def started(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        return RayTrainLauncher(self._connection, attempt, planned, run_logger(attempt.run.messages))


class RayClusterBackend(RayBackend):
    """The cluster of RAY_ADDRESS. Its devices are its GPUs if it has any, otherwise its CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: dict[str, _Devices] = {}
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
        found = self._query_devices(nodes, kind)
        smallest = min(found, key=lambda devices: devices.bytes)
        count = sum(node.total for node in nodes)
        links = read_links(CACHE, name)
        network, reduction = (links.between_nodes, links.all_reduce) if links is not None else (None, None)
        return Cluster(
            count,
            smallest.bytes,
            "gpu" if kind == "GPU" else "cpu",
            nodes,
            None,
            network,
            reduction,
            smallest.name,
            all(devices.has_bf16 for devices in found),
        )

    def close(self) -> None:
        self._connection.close()

    def measure_layers(
        self,
        work: Measurable,
        cluster: Cluster,
        workers: int,
        threads: int,
        log_file: Path,
        data: Path | None,
        log: Log,
    ) -> list[LayerMeasurements]:
        """Measures a workload's layers on the node with the most free devices."""
        kind = cluster.kind.upper()
        node = self._wait_for_free_node(kind, workers, log)
        if data is not None:
            send_folder(data, [node])
        resources = {f"num_{kind.lower()}s": workers}
        measurements: list[LayerMeasurements] = _run_on(
            node, measure_here, MEASURING_S, work, cluster, workers, threads, log_file.resolve(), **resources
        )
        return measurements

    def probe_device(self, cluster: Cluster, log: Log) -> Device:
        kind = cluster.kind.upper()
        resources = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 0}
        node = self._wait_for_free_node(kind, 1, log)
        device: Device = _run_on(node, this_device, FACTS_TIMEOUT_S, cluster.bytes_per_device, **resources)
        return device

    def _query_devices(self, nodes: Sequence[Node], kind: str) -> list[_Devices]:
        """Returns the nodes' devices; queries new nodes in parallel, and each node only once."""
        calls = {node.id: _start(node, _devices, kind, node.total) for node in nodes if node.id not in self._devices}
        for node in nodes:
            if node.id in calls:
                self._devices[node.id] = _result(node, _devices, calls[node.id], FACTS_TIMEOUT_S)
        return [self._devices[node.id] for node in nodes]

    def _wait_for_free_node(self, kind: str, workers: int, log: Log) -> Node:
        """Waits until a node has ``workers`` free devices; returns the node with the most. Raises BusyError if none has
        enough in time."""

        def find() -> Node:
            node = max(self._connection.nodes(kind), key=lambda node: node.free, default=None)
            if node is not None and node.free >= workers:
                return node
            available = f"{node.free} are free on {node.name}, the most of all nodes" if node else "no node answers"
            raise BusyError(f"measuring the layers needs {workers} devices on one node, and {available}")

        return wait_for_devices(find, MEASURING_S, log, "; try again when devices are free")


@dataclass(frozen=True)
class _Devices:
    """A node's devices: bytes of each device, their name, and whether GPUs multiply bf16."""

    bytes: int
    name: str
    has_bf16: bool = True


def _devices(kind: str, count: int) -> _Devices:
    """Returns the devices of the node that this runs on."""
    if kind == "GPU":
        cluster = gpus()
        return _Devices(cluster.bytes_per_device, cluster.name, cluster.has_bf16)
    memory = this_machine().bytes_per_device * this_machine().devices
    return _Devices(memory // count, f"{cpu_model()} of {os.uname().nodename}")


def _run_on(node: Node, function: Callable[..., Any], timeout_s: float, *args: Any, **resources: float) -> Any:
    """Runs a function on a node and returns its result. Raises PlacementError when it fails or takes too long."""
    return _result(node, function, _start(node, function, *args, **resources), timeout_s)


def _start(node: Node, function: Callable[..., Any], *args: Any, **resources: float) -> Any:
    """Starts a function on a node; returns its object reference."""
    return start_on(node.id, function, *args, max_retries=0, **resources)


def _result(node: Node, function: Callable[..., Any], result: Any, timeout_s: float) -> Any:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(result, timeout=timeout_s)
    except GetTimeoutError:
        ray.cancel(result, force=True)
        raise PlacementError(
            f"node {node.name} did not answer within {timeout_s:.0f} s: it hangs, or its devices have just become "
            f"busy; run `{command('doctor')}`, or try again"
        ) from None
    except RayError as error:
        raise PlacementError(f"node {node.name} failed in {function.__name__}: {reason(error)}") from error
