"""Layer costs measured on this machine, kept by what they depend on; estimated where it cannot be measured."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from experiments.cluster import Cluster
from experiments.planning import Price, Pricer, estimated_price
from experiments.workload import Measurable
from launch.devices import cores
from suite.pipeline.costs import LayerCost, Taken
from suite.pipeline.devices import this_device
from suite.pipeline.plan import Machine
from suite.pipeline.profile import COPIES, LEAST_ROUNDS, WARM_UPS
from suite.pipeline.simulate import Link

VERSION = 2
"""Of what is measured and how. Raise it when that changes, or old costs stay in use."""

PATIENCE_S = 60.0
"""Measuring that would take longer than this, by estimate, is not begun: the estimate stands, and is marked."""


def pricer(cache: Path, say: Callable[[str], None]) -> Pricer:
    """Returns what finds the costs of a workload: over the declared device of a cluster, or measured here."""

    def price(work: Measurable, cluster: Cluster) -> Price:
        if cluster.device is not None:
            return estimated_price(work, cluster)
        return measured_price(work, cluster, cache, say)

    return price


def measured_price(
    work: Measurable, cluster: Cluster, cache: Path, say: Callable[[str], None], patience_s: float = PATIENCE_S
) -> Price:
    """Returns costs measured on this machine, in as many processes at once as will compute at once.

    What would take longer than ``patience_s``, by estimate, is estimated.
    """
    # two at least where there is a link to measure; cores can take turns
    least = 2 if work.pipeline.stages > 1 and cluster.kind == "cpu" else 1
    workers = min(work.pipeline.stages * work.pipeline.replicas, max(least, cluster.devices))
    threads = work.threads or max(1, cores() // workers)
    device = _device_name(cluster)
    path = cache / f"{_digest(work.key(), device, workers, threads)}.json"
    where = f"{device}, {workers} at once, {threads} threads each"
    kept = _read(path)
    if kept is not None:
        costs, machine = kept
        machine = replace(machine, limit=cluster.bytes_per_device)
        return Price(costs, machine, f"measured on {where}; kept", measured=True)
    too_long = _too_long(work, cluster, patience_s)
    if too_long is not None:
        return too_long
    say(f"measuring the layers on {where}")
    cache.mkdir(parents=True, exist_ok=True)
    costs, machine = _measure(work, cluster, workers, threads, cache / "measuring.log")
    draft = path.with_suffix(f".draft-{uuid4().hex}")  # runs of a sweep may measure the same at the same time
    draft.write_text(json.dumps({"costs": [asdict(cost) for cost in costs], "machine": asdict(machine)}))
    draft.rename(path)
    return Price(costs, machine, f"measured on {where}", measured=True)


def _measure(
    work: Measurable, cluster: Cluster, workers: int, threads: int, log: Path
) -> tuple[tuple[LayerCost, ...], Machine]:
    from launch.measure import Measured, measure_layers
    from launch.spawn import run_processes

    found: list[Measured] = run_processes(measure_layers, workers, work, threads, cluster.kind == "gpu", log)
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


def _too_long(work: Measurable, cluster: Cluster, patience_s: float) -> Price | None:
    """Returns the estimate when measuring would take too long or more memory than there is."""
    device = this_device(cluster.bytes_per_device)
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


def _read(path: Path) -> tuple[tuple[LayerCost, ...], Machine] | None:
    """Returns what was kept, or None where there is nothing whole."""
    try:
        kept = json.loads(path.read_text())
        machine = dict(kept["machine"], link=Link(**kept["machine"]["link"]))
        return tuple(map(_cost, kept["costs"])), Machine(**machine)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _cost(kept: dict[str, Any]) -> LayerCost:
    return LayerCost(**kept | {"takes": tuple(Taken(**taken) for taken in kept["takes"])})


def _digest(*parts: object) -> str:
    import torch

    return hashlib.sha256(repr((VERSION, torch.__version__, *parts)).encode()).hexdigest()[:16]


def _device_name(cluster: Cluster) -> str:
    import torch

    if cluster.kind == "gpu":
        return torch.cuda.get_device_name(0)
    return f"this machine's {_cpu_model()} ({cores()} cores)"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
