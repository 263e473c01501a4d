"""Stages on several kinds of devices: which stage is on which kind, and on which node.

    8xH100+8xA100-40GB   K = 4, R = 4     each replica has at most 2 of each kind
                         H H A A          stage k of all replicas is on the same kind, so all replicas take as long

Devices of a kind follow one another, and the kinds come in a given order. How many stages each kind has is chosen
together with the cut of the layers, so that the slowest stage is as fast as possible: exactly, for one cell per stage,
without messages, and without recomputes if it fits so. Other schedules, and cells given by hand, get the same devices.
Inside a node all links count as those of the slowest kind in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.planning.memory_limits import reserved_bytes
from experiments.planning.plan_report import LayerCosts
from suite.errors import PlacementError
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine, StageDevice
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.placement import Placement, place_on_kinds
from suite.pipeline.planning.simulate import Link

OTHER_SCHEDULES = ("auto", "csv", "search")
"""The values of ``pipeline.schedule`` for whose memory 1F1B stands."""


def slowest(found: Mapping[str, LayerCosts]) -> str:
    """Returns the kind of device on which a micro-batch takes longest, of equal ones that with the longest update."""
    return max(found, key=lambda kind: (found[kind].seconds, sum(cost.update_s for cost in found[kind].costs)))


def with_seconds_of(whole: LayerCosts, kind: str, found: Mapping[str, LayerCosts]) -> LayerCosts:
    """Returns the costs of a cluster with the seconds of one kind of its devices, and the slowest links of all."""
    own = found[kind]
    costs = tuple(most.with_seconds_of(timed) for most, timed in zip(whole.costs, own.costs, strict=True))
    machine = with_slowest_links(whole.machine, [each.machine for each in found.values()])
    return replace(whole, costs=costs, machine=machine, device=own.device)


def on_unequal_devices(
    machine: Machine,
    costs: Sequence[LayerCost],
    kinds: Sequence[tuple[Cluster, LayerCosts]],
    cluster: Cluster,
    work: Experiment,
) -> tuple[Machine, Placement]:
    """Returns the machine with the device of each stage of a run, and where its workers are. ``kinds`` are those of the
    cluster in the order of the stages, with their layer costs; ``costs`` count for memory. They must hold the stages of
    all replicas."""
    pipeline, devices = work.pipeline, []
    workers, has_hosts = pipeline.stages * pipeline.replicas, cluster.kind == "cpu" and cluster.device is None
    for kind, layer_costs in kinds:
        share = kind.bytes_per_device
        if has_hosts:  # at least this, with all workers on one node
            share = min(share * node.total // min(node.total, workers) for node in kind.nodes)
        limit = share - reserved_bytes(work, kind, share)
        device = StageDevice(kind.label, limit, layer_costs.costs)
        devices += [device] * (kind.devices // pipeline.replicas)
    is_plain = pipeline.virtual_stages == 1 and pipeline.schedule not in OTHER_SCHEDULES
    update = {"schedule": pipeline.schedule if is_plain else "1f1b", "virtual_stages": 1, "schedule_rows": None}
    each = bytes_per_parameter(work.optimizer, pipeline.replicas)
    for remat in ("never", "auto") if pipeline.remat == "auto" else (pipeline.remat,):
        fit = MemoryFit(costs, pipeline.model_copy(update=update | {"remat": remat}), each, machine)
        with suppress(PlacementError):
            stages = fit.choose_devices(devices)
            break
    else:
        stages = fit.choose_devices(devices, in_memory=False)
    names = [stage.name for stage in stages]
    used = [one.machine for kind, one in kinds if kind.label in names]
    placement = place_on_kinds(cluster.nodes, names * pipeline.replicas, pipeline.stages)
    machine = replace(with_slowest_links(machine, used), stages=stages)
    if has_hosts:
        machine = _with_shares_of_hosts(machine, placement, cluster, work)
    return machine, placement


def with_slowest_links(machine: Machine, others: Sequence[Machine]) -> Machine:
    """Returns a machine with the slowest links of others."""
    links = [other.link for other in others if isinstance(other.link, Link)]
    reduce = min(other.reduce_bytes_per_s for other in others)
    return replace(machine, link=min(links, key=lambda link: link.bytes_per_s), reduce_bytes_per_s=reduce)


def _with_shares_of_hosts(machine: Machine, placement: Placement, cluster: Cluster, work: Experiment) -> Machine:
    """Returns a machine in which the workers of a node share all of its memory, and not only that of their cores."""
    used, each = Counter(placement.ids), {kind.label: kind.bytes_per_device for kind in cluster.parts}
    shares = [
        min(each[node.device] * node.total // used[node.id] for node in placement.nodes[stage :: placement.stages])
        for stage in range(placement.stages)
    ]
    limits = [share - reserved_bytes(work, cluster, share) for share in shares]
    stages = [replace(stage, memory_limit_bytes=limit) for stage, limit in zip(machine.stages, limits, strict=True)]
    reserve = max(shares) - max(limits)
    return replace(machine, stages=tuple(stages), memory_limit_bytes=max(limits), reserve=reserve)
