"""The planning problem of a run on a cluster: layer costs, links by place, and the memory that a plan may use.

run, cluster, cost model -> layer costs, with optimizer state -> placement, links -> memory less a reserve -> Problem
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.hints import command
from experiments.base.workload import Measurable
from models.chunked_loss import set_logits_bytes
from suite.errors import BusyError, PlacementError, PlanError, SettingError
from suite.pipeline.model.layers import check_frozen, count_parameters, ties_of, trainable
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GPU_PROCESS_BYTES, P2P_BYTES, Device, Machine, collective_bytes
from suite.pipeline.planning.estimate import estimate_on
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import FROZEN_BYTES, bytes_per_parameter
from suite.pipeline.planning.placement import Placement
from suite.pipeline.planning.simulate import Link, Links
from suite.pipeline.runtime.gradient_reducer import ACCELERATOR_BUCKET_BYTES
from suite.settings import OptimizerSettings
from suite.training.adafactor import BATCH_BYTES, BATCH_COPIES
from suite.training.update_rule import state_shapes

RESERVES = {"gpu": 0.05, "cpu": 0.3}
"""The share of a device's memory that plans leave free. CPU workers, whose C heap keeps freed blocks, were 20 to 37%
larger than their plan (measured: docs/performance.md), and the driver takes 0.3 GiB."""


@dataclass(frozen=True)
class LayerCosts:
    """Layer costs of a workload on a cluster's devices, and their source."""

    costs: tuple[LayerCost, ...]
    machine: Machine
    source: str
    measured: bool
    device: Device | None = None
    """The device of estimated costs; None for measured ones."""
    at_extremes: tuple[tuple[LayerCost, ...], ...] = ()
    """The costs at the highest and at the lowest efficiency of a declared device."""
    history: Path | None = None
    """The file of earlier runs on the device of measured costs (``launch/planning/cost_records.py``)."""
    notes: tuple[str, ...] = ()
    """What a plan says about the measurement, and about those runs."""


CostModel = Callable[[Measurable, Cluster], LayerCosts]


class PosedProblem(NamedTuple):
    problem: Problem
    layer_costs: LayerCosts
    """As the cost model returned them; those of another shape are the same."""
    placement: Placement | None
    """Which worker runs where, on several nodes."""
    notes: tuple[str, ...]


def pose(work: Experiment, cluster: Cluster, cost_model: CostModel) -> PosedProblem:
    """Returns the problem of a run whose number of micro-batches is known. Raises PlanError with all faults of its
    settings, devices and rows; nothing is built or measured before."""
    pipeline, workers = work.pipeline, work.pipeline.stages * work.pipeline.replicas
    if faults := work.trial_errors() or [*device_errors(work, cluster), *row_errors(work)]:
        raise PlanError(faults)
    try:
        found = cost_model(work, cluster)
        placement = cluster.place(pipeline.stages, pipeline.replicas)
        costs = _with_update(found.costs, work)
        machine = _with_communicators(found.machine, work, cluster)
    except (BusyError, PlanError):  # others hold the devices, which is no fault of the plan
        raise
    except (SettingError, PlacementError) as fault:
        raise PlanError([str(fault)]) from None
    machine = _with_share_of_host(machine, workers, cluster, placement)
    reserve = reserved_bytes(work, cluster, machine.memory_limit_bytes)
    machine = replace(machine, memory_limit_bytes=machine.memory_limit_bytes - reserve, reserve=reserve)
    notes = *work.remarks(), *found.notes
    if placement is not None:
        machine = across_nodes(machine, placement, cluster)
        notes += network_notes(placement, cluster)
    if workers > cluster.devices:
        notes += (
            f"{workers} workers share {cluster.devices} cores and take turns: a step takes at least their total work",
        )
    problem = Problem(costs, pipeline, bytes_per_parameter(work.optimizer, pipeline.replicas), machine)
    return PosedProblem(problem, found, placement, notes)


def shares_cores(cluster: Cluster) -> bool:
    """Whether workers may share the cores of this machine. A declared cluster has no more devices than declared."""
    return cluster.kind == "cpu" and cluster.device is None and not cluster.nodes


def device_errors(work: Experiment, cluster: Cluster) -> list[str]:
    """Returns a fault if there are fewer devices than workers, and they cannot share them."""
    stages, replicas = work.pipeline.stages, work.pipeline.replicas
    if stages * replicas <= cluster.devices or shares_cores(cluster):
        return []
    return [f"K = {stages} stages x R = {replicas} replicas need {stages * replicas} devices, there are {cluster}"]


def row_errors(work: Experiment) -> list[str]:
    """Returns a fault if there are more micro-batches than rows in a mini-batch."""
    pipeline, rows = work.pipeline, work.max_rows
    if pipeline.replicas * pipeline.micro_batches <= rows:
        return []
    return [
        f"R = {pipeline.replicas} x M = {pipeline.micro_batches:,} micro-batches are more than the {rows:,} "
        f"example{'s' if rows > 1 else ''} that a step of {work.batch:,} {work.unit} has at most; choose R x M of "
        f"{rows:,} or less"
    ]


def estimated_costs(work: Measurable, cluster: Cluster) -> LayerCosts:
    """Estimates costs from operations and bytes on the cluster's declared device.

    For this machine, which has no declared device, uses its memory and the speed of a TPUv3 core: the bytes are right,
    and seconds only beside each other.
    """
    device = cluster.device
    if device is None:
        is_gpu, memory = cluster.kind == "gpu", cluster.bytes_per_device
        process = GPU_PROCESS_BYTES if is_gpu else 0
        device = replace(DEVICES["TPUv3"], memory_bytes=memory, is_cuda=is_gpu, process_bytes=process)
    reduce = device.messages if cluster.device is not None else Link()
    machine = Machine(
        cluster.bytes_per_device,
        device.process_bytes,
        device.messages,
        reduce.bytes_per_s,
        reduce.latency_s,
        transport=cluster.transport,
    )
    share = "" if device.efficiency == 1 else f" at {device.efficiency:.0%} of its peak"
    source = f"operations and bytes over {device.name}{share}"
    of_any_memory = replace(device, memory_bytes=0)  # which no cost depends on
    costs, *extremes = _estimated(_KeyedWork(work, work.key()), of_any_memory, cluster.logits_bytes)
    at_extremes = tuple(extremes) if cluster.device is not None else ()
    return LayerCosts(costs, machine, source, measured=False, device=cluster.device, at_extremes=at_extremes)


@dataclass(frozen=True)
class _KeyedWork:
    """A workload that compares equal to others with the same costs."""

    work: Measurable = field(compare=False)
    key: str


@lru_cache(maxsize=64)
def _estimated(keyed: _KeyedWork, device: Device, logits_bytes: int) -> list[tuple[LayerCost, ...]]:
    """Returns the costs on a device that computes logits of this size at once, and those at its highest and its lowest
    efficiency. Cached, because the plans of a list need the same costs many times."""
    work = keyed.work
    layers, loss = work.build()
    set_logits_bytes(layers, logits_bytes)
    lowest, highest = device.efficiency_range
    devices = [replace(device, efficiency=share) for share in (device.efficiency, highest, lowest)]
    return [*map(tuple, estimate_on(devices, layers, loss, work.sample().largest, work.optimizer))]


@dataclass(frozen=True)
class ModelFacts:
    """What a plan needs of a model beside the costs of its layers."""

    parameters: int
    """Without copies of tied ones."""
    tied: int
    """Parameters that several layers share."""
    state_bytes: tuple[int, ...]
    """Each layer's optimizer state that has not a value per parameter value: Adafactor's rows and columns; and
    what frozen parameters take more than in fp32."""
    not_fp32: tuple[tuple[int, int], ...]
    """For each layer, the values of its trained parameters that are not fp32, and their bytes."""


def model_facts(work: Measurable) -> ModelFacts:
    """Returns the facts of a workload's model. Raises SettingError for wrongly frozen parameters (``check_frozen``)."""
    return _model_facts(_KeyedWork(work, work.key()))


@lru_cache(maxsize=64)
def _model_facts(keyed: _KeyedWork) -> ModelFacts:
    """Cached, because building a large model takes seconds."""
    layers, _ = keyed.work.build()
    check_frozen(layers)
    ties = {tie for layer in layers for tie in ties_of(layer).values()}
    shapes = [[tuple(parameter.shape) for parameter in trainable(layer)] for layer in layers]
    state_bytes = tuple(
        sum(_state_bytes(shape, keyed.work.optimizer) for shape in of_layer)
        + sum(each.nbytes - FROZEN_BYTES * each.numel() for each in layer.parameters() if not each.requires_grad)
        for layer, of_layer in zip(layers, shapes, strict=True)
    )
    others = [[each for each in trainable(layer) if each.dtype != torch.float32] for layer in layers]
    not_fp32 = tuple((sum(each.numel() for each in own), sum(each.nbytes for each in own)) for own in others)
    return ModelFacts(count_parameters(layers), len(ties), state_bytes, not_fp32)


def _state_bytes(shape: tuple[int, ...], optimizer: OptimizerSettings) -> int:
    per_value = {*optimizer.state_names, "step"}
    return sum(4 * math.prod(of) for name, of in state_shapes(shape, optimizer).items() if name not in per_value)


def _with_update(costs: Sequence[LayerCost], work: Measurable) -> tuple[LayerCost, ...]:
    """Returns the costs with the optimizer's state that ``bytes_per_parameter`` does not count, and with room for the
    batches in which Adafactor updates small parameters of a stage (those of a layer by itself may be smaller).

    A trained parameter that is not fp32 has a gradient and a state of its own type, and its stage no ZeRO. Then ZeRO is
    counted for no stage.
    """
    facts = model_facts(work)
    whole, counted = (bytes_per_parameter(work.optimizer, count) for count in (1, work.pipeline.replicas))
    batches = BATCH_COPIES * min(BATCH_BYTES, 4 * facts.parameters) if work.optimizer.name == "adafactor" else 0
    has_others = any(others for others, _ in facts.not_fp32)
    found = []
    for cost, state_bytes, (others, other_bytes) in zip(costs, facts.state_bytes, facts.not_fp32, strict=True):
        trained = cost.parameters - cost.frozen
        words = trained - others + other_bytes / 4
        unsharded = math.ceil(whole * words - counted * trained) if has_others else 0
        update_peak_bytes = max(cost.update_peak_bytes, batches if trained > 0 else 0)
        found.append(replace(cost, state_bytes=state_bytes + unsharded, update_peak_bytes=update_peak_bytes))
    return tuple(found)


def _with_communicators(machine: Machine, work: Measurable, cluster: Cluster) -> Machine:
    """Returns the machine with the bytes that communication takes on a GPU."""
    if cluster.kind != "gpu" or cluster.transport != "nccl":
        return machine
    facts, pipeline = model_facts(work), work.pipeline
    collectives = collective_bytes(pipeline.stages, pipeline.replicas, facts.tied)
    # a bucket that is reduced is less than twice as large as one that is full, beside the gradients it replaces
    bucket = min(2 * ACCELERATOR_BUCKET_BYTES, 4 * facts.parameters) if pipeline.replicas > 1 else 0
    return replace(machine, p2p_bytes=P2P_BYTES, process_bytes=machine.process_bytes + collectives + bucket)


def _with_share_of_host(machine: Machine, workers: int, cluster: Cluster, placement: Placement | None) -> Machine:
    """Returns the machine with each worker's share of the memory of its host, and of the cores of this one. Devices
    that are declared or accelerators are not shared."""
    if shares_cores(cluster):
        share = cluster.bytes_per_device * cluster.devices // workers
        return replace(machine, memory_limit_bytes=share, cores=cluster.devices)
    if cluster.kind == "gpu" or cluster.device is not None or placement is None:
        return machine
    used = Counter(placement.ids)
    share = min(cluster.bytes_per_device * node.total // used[node.id] for node in placement.nodes)
    return replace(machine, memory_limit_bytes=share)


def reserved_bytes(work: Measurable, cluster: Cluster, memory: int) -> int:
    """Returns the bytes of a device that a plan leaves free."""
    share = work.pipeline.memory_reserve
    return int((RESERVES[cluster.kind] if share is None else share) * memory)


def across_nodes(machine: Machine, placement: Placement, cluster: Cluster) -> Machine:
    """Returns the machine with the link of each pair of neighbouring stages, and the rate and latency between replicas:
    of the slower of the two kinds where replicas span nodes. An unmeasured network of CPUs counts like the links inside
    a node."""
    network = cluster.between
    if network is None:
        return machine
    assert isinstance(machine.link, Link)
    link = Links(machine.link, network, placement.cuts) if placement.cuts else machine.link
    rate, latency_s = machine.reduce_bytes_per_s, machine.reduce_latency_s
    if placement.spread:
        rate = min(rate, (cluster.reduction or network).bytes_per_s)
        latency_s = max(latency_s, network.latency_s)
    return replace(machine, link=link, reduce_bytes_per_s=rate, reduce_latency_s=latency_s)


def _gbit_per_s(link: Link) -> str:
    return f"{8 * link.bytes_per_s / 1e9:.0f} Gbit/s"


def network_notes(placement: Placement, cluster: Cluster) -> tuple[str, ...]:
    """Returns a note on the links of a plan that uses the network."""
    if not (placement.cuts or placement.spread):
        return ()
    if cluster.device is not None and cluster.between is not None:
        inside, outside = cluster.device, cluster.between
        return (
            f"links, declared: {inside.link_name} inside a node, {inside.link / 1e9:.0f} GB/s each way; the network "
            f"between nodes, {_gbit_per_s(outside)} a device",
        )
    if cluster.network is None:
        like = "like the links inside a node" if cluster.between is None else f"{_gbit_per_s(cluster.between)} a device"
        return (f"the network between nodes is not measured (run {command('doctor')}): assumed to be {like}",)
    latency, rate = cluster.network.latency_s * 1e3, cluster.network.bytes_per_s / 1e6
    return (f"the network between nodes, measured by {command('doctor')}: {latency:.2f} ms, {rate:,.0f} MB/s",)
