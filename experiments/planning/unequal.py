"""Stages on several kinds of devices: which stage is on which kind, and on which node.

    8xH100+8xA100-40GB   K = 4, R = 4     each replica has at most 2 of each kind
                         H H A A          stage k of all replicas is on the same kind, so all replicas take as long

Devices of a kind follow one another, and the kinds come in a given order. How many stages each kind has is chosen
together with the cut of the layers, so that the slowest stage is as fast as possible: exactly, for one cell a stage and
``partition_unequal``'s times without messages. Other schedules, and cells given by hand, get the same devices. Inside a
node all links count as the slowest kind's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.planning.plan_report import LayerCosts
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine, StageDevice
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.placement import Node, Placement
from suite.pipeline.planning.simulate import Link

OTHER_SCHEDULES = ("auto", "csv", "search")
"""The values of ``pipeline.schedule`` for whose memory 1F1B stands."""


def on_unequal_devices(
    machine: Machine,
    costs: Sequence[LayerCost],
    kinds: Sequence[tuple[Cluster, LayerCosts]],
    cluster: Cluster,
    work: Experiment,
) -> tuple[Machine, Placement]:
    """Returns the machine with the device of each stage of a run, and where its workers are. ``kinds`` are those of the
    cluster in the order of the stages, with their layer costs; ``costs`` count for memory."""
    pipeline, devices = work.pipeline, []
    for kind, layer_costs in kinds:
        assert kind.device is not None, "the devices of a mixed cluster are declared"
        limit = kind.bytes_per_device - reserved_bytes(work, kind.bytes_per_device)
        device = StageDevice(kind.device.name, limit, layer_costs.costs)
        devices += [device] * (kind.devices // pipeline.replicas)
    machines = [layer_costs.machine for _, layer_costs in kinds]
    machine = replace(
        machine,
        link=min((one.link for one in machines if isinstance(one.link, Link)), key=lambda link: link.bytes_per_s),
        reduce_bytes_per_s=min(one.reduce_bytes_per_s for one in machines),
    )
    is_plain = pipeline.virtual_stages == 1 and pipeline.schedule not in OTHER_SCHEDULES
    update = {"schedule": pipeline.schedule if is_plain else "1f1b", "virtual_stages": 1, "schedule_rows": None}
    with_one_cell = pipeline.model_copy(update=update)
    each = bytes_per_parameter(work.optimizer, pipeline.replicas)
    stages = MemoryFit(costs, with_one_cell, each, machine).choose_devices(devices)
    nodes = tuple(_nodes(cluster, [stage.name for stage in stages] * pipeline.replicas))
    return replace(machine, stages=stages), Placement(nodes, pipeline.stages)


def _nodes(cluster: Cluster, names: Sequence[str]) -> Iterator[Node]:
    """Yields the nodes of workers on devices of these names: of each kind in the order of the cluster."""
    unused: dict[str, list[Node]] = {}
    nodes = iter(cluster.nodes)
    for part in cluster.parts:
        assert part.device is not None, "the devices of a mixed cluster are declared"
        own = unused.setdefault(part.device.name, [])
        for _ in part.nodes or (None,):
            node = next(nodes)
            own += [node] * node.total
    for name in names:
        yield unused[name].pop(0)


def reserved_bytes(work: Experiment, memory: int) -> int:
    """Returns the bytes of a device that a plan leaves free."""
    return int(work.pipeline.memory_reserve * memory)
