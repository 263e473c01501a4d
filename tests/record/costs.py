"""The layer costs that plans take: those of an older record where it has them, otherwise this commit's estimates.

The costs of two cores, which a run measures, were measured once: two_cores.json has the seconds of each layer, which
are scaled to the values in a micro-batch. Their bytes are estimated.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("two_cores.json")

GIB = 2**30


class Costs:
    """Costs by model, device and shapes; each is a list of [layers in a row, value] for each field."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.saved = saved
        self.own: dict[str, Any] = {}
        self.model = ""
        """Of the plan that is made now."""

    def choose(self, key: str, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Keeps this commit's costs of all layers, and returns the saved ones if there are any."""
        self.own[key] = packed(own)
        return unpacked(self.saved[key]) if key in self.saved else own


def packed(layers: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {name: [layer[name] for layer in layers] for name in layers[0]}
    return {name: [[len(list(run)), value] for value, run in groupby(column)] for name, column in columns.items()}


def unpacked(columns: dict[str, Any]) -> list[dict[str, Any]]:
    values = {name: [value for count, value in runs for _ in range(count)] for name, runs in columns.items()}
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def feed(costs: Costs) -> None:
    """Lets all plans of this process take their estimates from ``costs``."""
    from suite.pipeline.planning.costs import LayerCost, SkipInput

    problem = import_module("experiments.planning.problem")
    estimate_on = problem.estimate_on

    def chosen(devices: Any, layers: Any, loss: Any, data: Any, optimizer: Any) -> list[list[LayerCost]]:
        shapes = " ".join(str(tuple(tensor.shape)) for tensor in (*data.inputs, *data.targets))
        found = []
        for device, own in zip(devices, estimate_on(devices, layers, loss, data, optimizer), strict=True):
            kind = f"{device.name}, {device.memory_bytes} bytes at {device.efficiency}"
            key = f"{costs.model} on {kind}, {optimizer.name} {optimizer.precision}: {shapes}"
            of_layers = costs.choose(key, json.loads(json.dumps([asdict(cost) for cost in own])))
            skips = [tuple(SkipInput(**skip) for skip in cost["skip_inputs"]) for cost in of_layers]
            found.append([LayerCost(**cost | {"skip_inputs": own}) for cost, own in zip(of_layers, skips, strict=True)])
        return found

    problem.estimate_on = chosen


def two_cores(costs: Costs) -> None:
    """Lets plans without a declared cluster be for two cores of 8 GiB, with the seconds of ``two_cores.json``."""
    from experiments.base.cluster import Cluster
    from experiments.planning.problem import estimated_costs
    from launch.backends.backend import Backend
    from launch.planning import command
    from suite.pipeline.planning.simulate import Link

    class TwoCores(Backend):
        def cluster(self) -> Cluster:
            return Cluster(2, 8 * GIB, "cpu")

    def measured(work: Any, cluster: Cluster) -> Any:
        found = estimated_costs(work, cluster)
        known = json.loads(MEASURED.read_text()).get(costs.model)
        if cluster.device is not None or known is None:
            return found
        sample = work.sample().typical
        values = sum(tensor.numel() for tensor in sample.inputs)
        layers = zip(found.costs, unpacked(known["seconds"]), strict=True)
        factor = values / known["values"]
        timed = tuple(
            replace(cost, **{name: seconds * (1 if name == "update_s" else factor) for name, seconds in own.items()})
            for cost, own in layers
        )
        machine = replace(found.machine, process_bytes=2 * GIB // 5, link=Link(1e-4, 1e9), reduce_bytes_per_s=1e9)
        return type(found)(timed, machine, "two_cores.json", measured=True)

    command.cluster_backend = TwoCores
    command.MeasuredCosts = lambda *arguments: measured
