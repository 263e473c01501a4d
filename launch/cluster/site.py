"""A Ray cluster as the place of a run: its devices, layer costs measured on them, its workers started by Ray Train."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.cluster import Cluster
from experiments.planned import Pricer
from experiments.workload import Measurable
from launch.cluster.causes import first_line
from launch.cluster.connection import Connection, address, answering
from launch.cluster.data_transfer import receiver_on, send_folder
from launch.cluster.ray_train import RaySession
from launch.devices import gpus, this_machine
from launch.doctor.kept import read_links
from launch.measure import Measured
from launch.pricing import cpu_model, measure_here, pricer
from launch.runs import CACHE
from launch.site import Site, said
from launch.supervise import Launcher
from launch.worker import Job
from suite.errors import BusyError, PlacementError
from suite.pipeline.devices import Device, this_device
from suite.pipeline.placement import Node, Placement

LOOK_AT_S = 60.0
"""Seconds for a look at one node's devices; a worker process of Ray starts for it."""

MEASURING_S = 300.0
"""Seconds for measuring layers on a node, and as many before for its devices to be free."""


class LocalRay(Site):
    """This machine, its workers started by a Ray of the run's own."""

    @contextmanager
    def started(self, job: Job, planned: Placement | None) -> Iterator[Launcher]:
        """A context with what starts workers, where they were planned or where there is room now."""
        with RaySession(Connection(), job.use_gpu, planned, said(job)) as session:
            yield session


class RayCluster(Site):
    """The cluster of RAY_ADDRESS. GPUs are its devices where it has any, else its CPUs."""

    def __init__(self) -> None:
        self._connection = Connection()
        self._seen: dict[str, _Devices] = {}

    def cluster(self) -> Cluster:
        """Returns the devices of the nodes that answer, whoever holds them now.

        Raises PlacementError when the cluster is away, or has none.
        """
        with answering("which devices it has"):
            kind = self._connection.kind()
            nodes = tuple(replace(node, free=node.total) for node in self._connection.nodes(kind))
            if not nodes:
                raise PlacementError(f"the Ray cluster at {address()} has no node with a device; add one")
            name = self._connection.name()
        seen = self._look_at(nodes, kind)
        smallest = min(seen, key=lambda one: one.bytes)
        count = sum(node.total for node in nodes)
        links = read_links(CACHE, name)
        network, reduction = (links.between, links.all_reduce) if links is not None else (None, None)
        return Cluster(
            count, smallest.bytes, "gpu" if kind == "GPU" else "cpu", nodes, None, network, reduction, smallest.name
        )

    def close(self) -> None:
        """Disconnects."""
        self._connection.close()

    def pricer(self, cache: Path, data: Path | None, say: Callable[[str], None]) -> Pricer:
        """Returns what measures layer costs on a node of the cluster, kept in ``cache``, on ``data`` if any."""

        def measure(work: Measurable, cluster: Cluster, workers: int, threads: int, log: Path) -> list[Measured]:
            kind = "GPU" if cluster.kind == "gpu" else "CPU"
            node = self._free(kind, workers, say)
            if data is not None:
                send_folder(data, {receiver_on(node, data): node})
            resources = {f"num_{kind.lower()}s": workers}
            return _on(node, measure_here, MEASURING_S, work, cluster, workers, threads, log.resolve(), **resources)  # type: ignore[no-any-return]

        def look(cluster: Cluster) -> Device:
            kind = "GPU" if cluster.kind == "gpu" else "CPU"
            device = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 0}
            return _on(self._free(kind, 1, say), this_device, LOOK_AT_S, cluster.bytes_per_device, **device)  # type: ignore[no-any-return]

        return pricer(cache, say, measure, look)

    @contextmanager
    def started(self, job: Job, planned: Placement | None) -> Iterator[Launcher]:
        """A context with what starts workers, where they were planned or where there is room now."""
        with RaySession(self._connection, job.use_gpu, planned, said(job)) as session:
            yield session

    def _look_at(self, nodes: Sequence[Node], kind: str) -> list[_Devices]:
        """Returns what the nodes' devices are; each is asked once, all at the same time."""
        asked = {node.id: _begun(node, _devices, kind, node.total) for node in nodes if node.id not in self._seen}
        for node in nodes:
            if node.id in asked:
                self._seen[node.id] = _result(node, _devices, asked[node.id], LOOK_AT_S)
        return [self._seen[node.id] for node in nodes]

    def _free(self, kind: str, workers: int, say: Callable[[str], None]) -> Node:
        """Returns the node with the most devices free, having waited for so many. Raises BusyError when none has enough
        of them."""
        until, told = time.monotonic() + MEASURING_S, False
        while True:
            node = max(self._connection.nodes(kind), key=lambda node: node.free, default=None)
            if node is not None and node.free >= workers:
                return node
            most = f"{node.free} are free on {node.name}, the most of all nodes" if node else "no node answers"
            lack = f"layers are measured with {workers} workers on one node, and {most}"
            if time.monotonic() > until:
                raise BusyError(f"{lack}; waited {MEASURING_S:.0f} s for them; try again when devices are free")
            if not told:
                say(f"{lack}; waiting, {MEASURING_S:.0f} s at most")
                told = True
            time.sleep(1.0)


@dataclass(frozen=True)
class _Devices:
    """What a node has: bytes of each device, and their name."""

    bytes: int
    name: str


def _devices(kind: str, count: int) -> _Devices:
    """Runs on the node."""
    if kind == "GPU":
        found = gpus()
        return _Devices(found.bytes_per_device, found.name)
    memory = this_machine().bytes_per_device * this_machine().devices
    return _Devices(memory // count, f"{cpu_model()} of {os.uname().nodename}")


def _on(node: Node, what: Callable[..., Any], deadline_s: float, *args: Any, **resources: float) -> Any:
    """Returns what a function returns on a node. Raises PlacementError when that does not come in time."""
    return _result(node, what, _begun(node, what, *args, **resources), deadline_s)


def _begun(node: Node, what: Callable[..., Any], *args: Any, **resources: float) -> Any:
    """Begins with a function on a node; returns what stands for its result."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node.id, soft=False)
    task = ray.remote(what).options(scheduling_strategy=where, max_retries=0, **({"num_cpus": 0} | resources))
    return task.remote(*args)


def _result(node: Node, what: Callable[..., Any], result: Any, deadline_s: float) -> Any:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(result, timeout=deadline_s)
    except GetTimeoutError:
        ray.cancel(result, force=True)
        raise PlacementError(
            f"node {node.name} did not come to an answer within {deadline_s:.0f} s: it hangs, or others took its "
            "devices just then; see `make doctor`, or try again"
        ) from None
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise PlacementError(f"node {node.name} failed at {what.__name__}: {first_line(cause)}") from error
