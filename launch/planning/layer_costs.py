"""Layer costs: measured and cached, or estimated where they cannot be measured.

Cached costs are measured again if this machine was busy when they were measured and is not now, or if the environment
variable REMEASURE is set.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments.base.cluster import Cluster
from experiments.base.workload import Measurable
from experiments.planning.problem import LayerCosts, estimated_costs
from launch.backends.backend import Backend
from launch.planning.cost_records import CostRecord, last_runs
from launch.worker.devices import cpu_model
from suite.cgroups import cpu_limit
from suite.errors import PlacementError
from suite.log import Log
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine, this_device
from suite.pipeline.planning.estimate import CudaDropout
from suite.pipeline.planning.measure import COPIES, LEAST_ROUNDS, WARM_UPS

if TYPE_CHECKING:
    from launch.worker.measure import LayerMeasurements

VERSION = 15
"""Version of the measurement. Raise it when the measurement changes, so that cached costs are not used."""

STARTED = time.time()
"""REMEASURE applies to costs measured before this time: a process may plan several times, but measures only once."""

LOAD = os.getloadavg()[0]
"""The machine's load when this process began: later its own measurements are a part of it."""


@dataclass(frozen=True)
class MeasuredCosts:
    """Finds the layer costs of a workload (a ``CostModel``): estimated for a declared device, otherwise measured on
    ``backend`` and cached in the folder ``cache``."""

    cache: Path
    log: Log
    backend: Backend = field(default_factory=Backend)
    data: Path | None = None
    """The prepared data to measure with, if any."""
    timeout_s: float = 60.0
    """If a measurement would take longer than this, by estimate, it returns estimated costs, marked as such."""

    def __call__(self, work: Measurable, cluster: Cluster) -> LayerCosts:
        """Returns the costs, measured in as many concurrent processes as the run has workers on a node."""
        if cluster.device is not None:
            return estimated_costs(work, cluster)
        # at least two if there is a link to measure; processes can share a core
        largest = max((node.total for node in cluster.nodes), default=2)
        least = min(2, largest) if work.pipeline.stages > 1 and cluster.kind == "cpu" else 1
        workers = min(work.pipeline.stages * work.pipeline.replicas, max(least, _workers_per_node(work, cluster)))
        if cluster.device_names:  # it is measured on one of the nodes with the slowest devices, perhaps the smallest
            workers = min(workers, min(node.total for node in cluster.nodes))
        threads = work.threads or max(1, _cores(cluster) // workers)
        device = cluster.name or f"this machine's {cpu_model()} ({cpu_limit()} cores)"
        if cluster.nodes and cluster.kind == "cpu":  # processors of one name may differ
            device = f"{device} of the cluster with {min(node.name for node in cluster.nodes)}"
        path = self.cache / f"{_digest(work.key(), device, workers, threads)}.json"
        history = self.cache / f"steps-{_digest(device)}.jsonl"
        where = f"{device}, {workers} processes, {threads} thread{'s' * (threads > 1)} each"
        record = CostRecord.read(path)
        reason = _reason_to_remeasure(record, cluster) if record is not None else ""
        is_cached = record is not None and not reason
        if record is None or reason:
            memory_bytes = _memory_bytes(cluster, workers)
            rates = self.backend.on_free_devices(partial(this_device, cluster.bytes_per_device), cluster, 1, self.log)
            self.backend.prepare_processes()  # while the layers are estimated
            declared = Cluster(cluster.devices, cluster.bytes_per_device, cluster.kind, device=rates)
            with CudaDropout() if rates.is_cuda else nullcontext():
                estimated = estimated_costs(work, declared)
            if reason_not_to := _reason_not_to_measure(estimated.costs, self.timeout_s, memory_bytes):
                return replace(estimated, source=f"{estimated.source}, because {reason_not_to}")
            self.log(f"measuring the layers{reason} on {where}")
            self.cache.mkdir(parents=True, exist_ok=True)
            log_file = (self.cache / "measuring.log").resolve()
            measure = partial(_measure, work, estimated.costs, cluster, workers, threads, log_file)
            measurements = self.backend.on_free_devices(measure, cluster, workers, self.log, self.data)
            load = max(measurement.load for measurement in measurements)
            load = min(load, LOAD) if _is_here(cluster) else load
            record = CostRecord(*_combine(measurements, cluster), load, time.time())
            record.write(path)
        limit, latency_s = cluster.bytes_per_device, record.machine.link.slowest.latency_s
        machine = replace(record.machine, memory_limit_bytes=limit, reduce_latency_s=latency_s)
        source = f"measured on {where}, {record.conditions}{'; cached' if is_cached else ''}"
        cores = _cores(cluster) if cluster.kind == "cpu" else math.inf  # a GPU's host may have a load of its own
        notes = *record.disturbance(cores), *last_runs(history)
        return LayerCosts(record.costs, machine, source, measured=True, history=history, notes=notes)


def _measure(
    work: Measurable, estimated: Sequence[LayerCost], cluster: Cluster, workers: int, threads: int, log_file: Path
) -> list[LayerMeasurements]:
    """Measures layers on this machine, in so many concurrent processes. The libraries' output goes to the log file."""
    from launch.backends.processes import run_processes
    from launch.worker.measure import measure_layers

    facts = cluster.kind == "gpu", log_file, cluster.logits_bytes, _memory_bytes(cluster, workers)
    return run_processes(measure_layers, workers, work, estimated, threads, *facts)


def _reason_to_remeasure(cached: CostRecord, cluster: Cluster) -> str:
    """Returns why cached costs must be measured again, as part of a sentence; empty if they are still good."""
    if _is_here(cluster) and LOAD <= cpu_limit() / 2 < cached.load:
        return f" again, because the machine was busy before ({cached.conditions}),"
    requested = os.environ.get("REMEASURE", "0") not in ("", "0")
    return " again, because REMEASURE is set," if requested and cached.measured < STARTED else ""


def _is_here(cluster: Cluster) -> bool:
    """Whether the devices are the cores of this machine, whose load this process sees."""
    return cluster.kind == "cpu" and not cluster.nodes


def _workers_per_node(work: Measurable, cluster: Cluster) -> int:
    """Returns the most workers that one node gets; if they cannot be placed, the most devices of a node."""
    try:
        placement = cluster.place(work.pipeline.stages, work.pipeline.replicas)
    except PlacementError:
        return max(node.total for node in cluster.nodes)
    return cluster.devices if placement is None else max(Counter(placement.ids).values())


def _cores(cluster: Cluster) -> int:
    """Returns the cores of a node: for a CPU cluster as many as Ray reports, otherwise this machine's."""
    return min(node.total for node in cluster.nodes) if cluster.nodes and cluster.kind == "cpu" else cpu_limit()


def _combine(measurements: Sequence[LayerMeasurements], cluster: Cluster) -> tuple[tuple[LayerCost, ...], Machine]:
    """Returns the layer costs and the machine from the measurements of several processes."""
    per_layer = zip(*(measurement.costs for measurement in measurements), strict=True)
    process_bytes = max(measurement.process_bytes for measurement in measurements)
    link = measurements[0].link
    machine = Machine(cluster.bytes_per_device, process_bytes, link, link.bytes_per_s, transport=cluster.transport)
    return tuple(_combine_layer(costs) for costs in per_layer), machine


def _combine_layer(costs: Sequence[LayerCost]) -> LayerCost:
    """Returns one layer's cost from several processes: mean seconds, maximum bytes."""
    values: dict[str, Any] = {}
    for name in (own.name for own in fields(LayerCost)):
        column = [getattr(cost, name) for cost in costs]
        combine = statistics.fmean if name.endswith("_s") else max
        values[name] = column[0] if name == "skip_inputs" else combine(column)
    return LayerCost(**values)


def _memory_bytes(cluster: Cluster, workers: int) -> int:
    """Returns the memory of each of the processes that measure at the same time on one node."""
    if cluster.kind == "gpu":
        return cluster.bytes_per_device
    cores = min(node.total for node in cluster.nodes) if cluster.nodes else cluster.devices
    return cluster.bytes_per_device * cores // workers


def _reason_not_to_measure(estimated: Sequence[LayerCost], timeout_s: float, most_bytes: int) -> str:
    """Returns why measuring would take too long or too much memory; empty if it does not."""
    copies = {cost: min(COPIES, count) for cost, count in Counter(estimated).items()}
    seconds = (WARM_UPS + LEAST_ROUNDS) * sum(count * cost.seconds for cost, count in copies.items())
    memory_bytes = max(
        count * (16 * cost.parameters + cost.activation_bytes) + cost.graph_peak_bytes + cost.backward_peak_bytes
        for cost, count in copies.items()
    )
    if seconds >= timeout_s:
        return f"measuring would take {seconds:.0f} s"
    return "a layer is too large to be measured" if memory_bytes >= most_bytes else ""


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr((VERSION, torch.__version__, *parts)).encode()).hexdigest()[:16]
