"""Layer costs measured on this machine, kept by what they depend on; estimated where it cannot be measured.

What is kept is measured again where the first steps of a run disagreed with it (``launch/step_check.py``), and where
the environment variable REMEASURE asks for it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.cluster import Cluster
from experiments.planned import Price, Pricer, in_seconds
from experiments.planning import estimated_price
from experiments.workload import Measurable
from launch.cost_records import CostRecord
from launch.limits import cores
from suite.errors import PlacementError
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import Device, this_device
from suite.pipeline.plan import Machine
from suite.pipeline.profile import COPIES, LEAST_ROUNDS, WARM_UPS

if TYPE_CHECKING:
    from launch.measure import Measured

VERSION = 2
"""Of what is measured and how. Raise it when that changes, or old costs stay in use."""

STARTED = time.time()
"""REMEASURE is for what was measured before: a process plans several times, and measures for the first."""

PATIENCE_S = 60.0
"""Measuring that would take longer than this, by estimate, is not begun: the estimate stands, and is marked."""


Measure = Callable[[Measurable, Cluster, int, int, Path], list["Measured"]]
"""Measures a workload's layers in so many processes at once, of so many threads each; what libraries print goes to a
file."""


def measure_here(work: Measurable, cluster: Cluster, workers: int, threads: int, log: Path) -> list[Measured]:
    """Measures on this machine."""
    from launch.measure import measure_layers
    from launch.spawn import run_processes

    return run_processes(measure_layers, workers, work, threads, cluster.kind == "gpu", log)


Look = Callable[[Cluster], Device]
"""Returns one of a cluster's devices with the rates it has, found in seconds."""


def look_here(cluster: Cluster) -> Device:
    """Looks at this machine."""
    return this_device(cluster.bytes_per_device)


def pricer(cache: Path, say: Callable[[str], None], measure: Measure = measure_here, look: Look = look_here) -> Pricer:
    """Returns what finds the costs of a workload: over the declared device of a cluster, or measured."""

    def price(work: Measurable, cluster: Cluster) -> Price:
        if cluster.device is not None:
            return estimated_price(work, cluster)
        return measured_price(work, cluster, cache, say, measure=measure, look=look)

    return price


def measured_price(
    work: Measurable, cluster: Cluster, cache: Path, say: Callable[[str], None], patience_s: float = PATIENCE_S,
    measure: Measure = measure_here, look: Look = look_here,
) -> Price:  # fmt: skip
    """Returns costs measured on one node, in as many processes at once as will compute there at once.

    What would take longer than ``patience_s``, by estimate, is estimated.
    """
    # two at least where there is a link to measure; cores can take turns
    largest = max((node.total for node in cluster.nodes), default=2)
    least = min(2, largest) if work.pipeline.stages > 1 and cluster.kind == "cpu" else 1
    workers = min(work.pipeline.stages * work.pipeline.replicas, max(least, _at_once(work, cluster)))
    threads = work.threads or max(1, _cores(cluster) // workers)
    device = _device_name(cluster)
    path = cache / f"{_digest(work.key(), device, workers, threads)}.json"
    where = f"{device}, {workers} at once, {threads} threads each"
    kept = CostRecord.read(path)
    why = _why_again(kept) if kept is not None else ""
    if kept is not None and not why:
        machine = replace(kept.machine, limit=cluster.bytes_per_device)
        return Price(kept.costs, machine, f"measured on {where}, {kept.conditions}; kept", measured=True, file=path)
    too_long = _too_long(work, cluster, patience_s, look)
    if too_long is not None:
        return too_long
    say(f"measuring the layers{why} on {where}")
    cache.mkdir(parents=True, exist_ok=True)
    found = measure(work, cluster, workers, threads, cache / "measuring.log")
    costs, machine = _joined_all(found, cluster)
    record = CostRecord(costs, machine, max(one.load for one in found), time.time())
    if kept is not None and kept.doubted:
        say(f"they take {in_seconds(record.seconds)} a micro-batch, and took {in_seconds(kept.seconds)} before")
        record = replace(record, confirmed=record.confirms(kept, _cores(cluster)))
    record.write(path)
    return Price(costs, machine, f"measured on {where}, {record.conditions}", measured=True, file=path)


def _why_again(kept: CostRecord) -> str:
    """Returns why kept costs are measured again; nothing where they are not."""
    if kept.doubted:
        return " again, as the first steps of a run disagreed with what was kept,"
    asked = os.environ.get("REMEASURE", "0") not in ("", "0")
    return " again, as REMEASURE asks," if asked and kept.measured < STARTED else ""


def _at_once(work: Measurable, cluster: Cluster) -> int:
    """Returns how many workers one node has at most; of those that cannot be placed, as many as it could have."""
    try:
        placement = cluster.place(work.pipeline.stages, work.pipeline.replicas)
    except PlacementError:
        return max(node.total for node in cluster.nodes)
    return cluster.devices if placement is None else max(Counter(placement.ids).values())


def _cores(cluster: Cluster) -> int:
    """Returns the cores of a node: of a cluster of CPUs what Ray says it has, otherwise this machine's."""
    return min(node.total for node in cluster.nodes) if cluster.nodes and cluster.kind == "cpu" else cores()


def _joined_all(found: Sequence[Measured], cluster: Cluster) -> tuple[tuple[LayerCost, ...], Machine]:
    costs = tuple(_joined(layer) for layer in zip(*(one.costs for one in found), strict=True))
    process = max(one.process for one in found)
    return costs, Machine(cluster.bytes_per_device, process, found[0].link, found[0].link.bytes_per_s)


def _joined(layer: Sequence[LayerCost]) -> LayerCost:
    """Returns one layer's cost from several processes: mean seconds, most bytes."""
    values: dict[str, Any] = {}
    for field in fields(LayerCost):
        column = [getattr(cost, field.name) for cost in layer]
        join = statistics.fmean if field.name.endswith("_s") else max
        values[field.name] = column[0] if field.name == "takes" else join(column)
    return LayerCost(**values)


def _too_long(work: Measurable, cluster: Cluster, patience_s: float, look: Look) -> Price | None:
    """Returns the estimate when measuring would take too long or more memory than there is."""
    device = look(cluster)
    here = Cluster(cluster.devices, cluster.bytes_per_device, cluster.kind, device=device)
    price = estimated_price(work, here)
    copies = {cost: min(COPIES, count) for cost, count in Counter(price.costs).items()}
    seconds = (WARM_UPS + LEAST_ROUNDS) * sum(count * cost.seconds for cost, count in copies.items())
    room = max(
        count * (16 * cost.parameters + cost.activations) + cost.graph_peak + cost.backward_peak
        for cost, count in copies.items()
    )
    if seconds < patience_s and room < cluster.bytes_per_device:
        return None
    why = f"measuring would take {seconds:.0f} s" if seconds >= patience_s else "a layer does not fit to be measured"
    return Price(price.costs, price.machine, f"{price.source}, as {why}", measured=False)


def _digest(*parts: object) -> str:
    import torch

    return hashlib.sha256(repr((VERSION, torch.__version__, *parts)).encode()).hexdigest()[:16]


def _device_name(cluster: Cluster) -> str:
    return cluster.name or f"this machine's {cpu_model()} ({cores()} cores)"


def cpu_model() -> str:
    """Returns the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
