"""A workload, a cluster and costs become a plan; where that fails, the nearest plans that can be run."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from experiments import overrides
from experiments.cluster import GIB, Cluster
from experiments.experiment import Experiment
from experiments.planned import Planned, Price, Pricer, in_seconds
from experiments.workload import Measurable, Workload
from suite.errors import BusyError, PlacementError, PlanError, SettingError, SuiteError
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import DEVICES, Device
from suite.pipeline.estimate import estimate
from suite.pipeline.layers import check_frozen, count_parameters
from suite.pipeline.memory import bytes_per_parameter
from suite.pipeline.placement import Placement
from suite.pipeline.plan import Machine, check_memory, least_limit, make_plan
from suite.pipeline.simulate import Link, Links
from suite.settings import PipelineSettings

RESERVE = 0.05
"""The share of each accelerator's memory that a plan leaves free: the allocator's fragmentation, and what libraries
take beyond CUDA's context. Our choice, not measured."""

TENTH = GIB // 10
"""The unit in which the least memory of a plan is looked for."""

Tell = Callable[[str], None]
"""Hears what is planned now."""


def estimated_price(work: Measurable, cluster: Cluster) -> Price:
    """Returns costs from operations and bytes over the cluster's declared device.

    A cluster of the machine at hand has none: its memory counts, and the speed of a TPUv3 core, which decides nothing
    where only bytes are asked for.
    """
    device = cluster.device or replace(DEVICES["TPUv3"], memory=cluster.bytes_per_device)
    costs = _estimated(_Keyed.of(work), device)
    reduce = device.link if cluster.device is not None else math.inf
    machine = Machine(cluster.bytes_per_device, device.process, device.messages, reduce)
    return Price(costs, machine, _source(device), measured=False)


@dataclass(frozen=True)
class _Keyed:
    """A work that equals another one of the same costs."""

    work: Measurable = field(compare=False)
    key: str = ""

    @staticmethod
    def of(work: Measurable) -> _Keyed:
        return _Keyed(work, work.key())


@lru_cache(maxsize=64)
def _estimated(keyed: _Keyed, device: Device) -> tuple[LayerCost, ...]:
    """Looking for the nearest plans asks for the same costs many times."""
    work = keyed.work
    layers, loss = work.build()
    return tuple(estimate(layers, loss, work.sample().largest, device, work.optimizer))


@lru_cache(maxsize=64)
def _parameters(keyed: _Keyed) -> int:
    """Returns the number of parameters; building a large model takes seconds. Raises SettingError for wrongly frozen
    ones (``check_frozen``)."""
    layers, _ = keyed.work.build()
    check_frozen(layers)
    return count_parameters(layers)


def _source(device: Device) -> str:
    share = "" if device.attained == 1 else f" at {device.attained:.0%} of its peak"
    return f"operations and bytes over {device.name}{share}"


def make(
    work: Workload, cluster: Cluster, pricer: Pricer, notes: tuple[str, ...] = (), given: str = "",
    tell: Tell = lambda text: None,
) -> Planned:  # fmt: skip
    """Returns the plan of a workload on a cluster. ``given`` are the settings that made the workload what it is.

    Raises PlanError with every fault, devices and memory alike, and with the nearest plans that have none, each as the
    whole of the settings that make it.
    """
    if wrong := work.faults() or _frozen_faults(work):  # no other number of devices or micro-batches is the remedy
        raise PlanError(wrong, notes=notes)
    try:
        tell(f"the plan of {work.name}")
        return attempt(work, cluster, pricer, notes)
    except PlanError as fault:
        process = 0 if row_faults(work) else _process_bytes(work, cluster, pricer)
        found = nearest(work, cluster, process, tell)
        remedies = [f'SET="{_merged(given, settings)}": {gain}' for settings, gain in found]
        told = notes if remedies else (*notes, *_larger_devices(work, cluster))
        raise PlanError(fault.faults, remedies, told) from None


def _frozen_faults(work: Workload) -> list[str]:
    """Returns what is wrong with the model's frozen parameters, before each worker finds it."""
    try:
        _parameters(_Keyed.of(work))
    except SettingError as fault:
        return [str(fault)]
    return []


def _larger_devices(work: Workload, cluster: Cluster) -> Iterator[str]:
    """Yields what memory would do where no setting does; nothing where memory is not what lacks."""
    pipeline = work.pipeline
    if row_faults(work) or (pipeline.stages * pipeline.replicas > cluster.devices and not _shares_cores(cluster)):
        return
    with suppress(SuiteError):
        least = least_memory(work, cluster)
        if least is not None and least > cluster.bytes_per_device:
            if _shares_cores(cluster):
                needs = f"at least {least * cluster.devices / GIB:.1f} GiB in all"
            else:
                needs = f"devices of at least {least / GIB:.1f} GiB"
            yield f"no setting was found that fits there; as it is set (K = {pipeline.stages}) it needs {needs}"


def least_memory(work: Workload, cluster: Cluster) -> int | None:
    """Returns the bytes that each of a cluster's devices must have at the least, the reserve included, in tenths of a
    GiB; None where no memory is enough. Costs are estimated."""
    price = estimated_price(work, cluster)
    each = bytes_per_parameter(work.optimizer, work.pipeline.replicas)
    if not _shares_cores(cluster):
        limit = least_limit(price.costs, work.pipeline, each, price.machine, TENTH)
        if limit is None:
            return None
        tenths = limit // TENTH
        while cluster.kind == "gpu" and tenths * TENTH - _reserve(tenths * TENTH) < limit:
            tenths += 1
        return tenths * TENTH
    limit = least_limit(price.costs, work.pipeline, each, _on_one_host(price.machine, work, cluster), TENTH)
    workers = work.pipeline.stages * work.pipeline.replicas
    return None if limit is None else -(-limit * workers // cluster.devices)


def _reserve(memory: int) -> int:
    """Returns the bytes of a device that a plan leaves free."""
    return int(RESERVE * memory)


def _shares_cores(cluster: Cluster) -> bool:
    """Whether workers take turns on cores at hand; of what is declared there is no more."""
    return cluster.kind == "cpu" and cluster.device is None and not cluster.nodes


def row_faults(work: Workload) -> list[str]:
    """Returns the fault of more micro-batches than a mini-batch has rows."""
    pipeline, rows = work.pipeline, work.most_rows
    if rows is None or pipeline.replicas * pipeline.micro_batches <= rows:
        return []
    return [
        f"R = {pipeline.replicas} x M = {pipeline.micro_batches:,} micro-batches are more than the {rows:,} examples "
        f"that a step of {work.batch:,} {work.unit} has at the most; use {_fewer_parts(pipeline, rows)}"
    ]


def _fewer_parts(pipeline: PipelineSettings, rows: int) -> str:
    """Returns the setting that cuts a mini-batch into no more than its rows: M, or R where M = 1 is still too many."""

    def most(name: str, count: int) -> str:
        return f"pipeline.{name}={count}" + (" or fewer" if count > 1 else "")

    if pipeline.replicas <= rows:
        return most("micro_batches", rows // pipeline.replicas)
    if pipeline.micro_batches <= rows:
        return most("replicas", rows // pipeline.micro_batches)
    return f"pipeline.replicas=1 with {most('micro_batches', rows)}"


def _merged(given: str, settings: str) -> str:
    """Returns settings with others laid over them."""
    pairs = dict(setting.partition("=")[::2] for setting in overrides.split(f"{given} {settings}"))
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in pairs.items())


def attempt(work: Workload, cluster: Cluster, pricer: Pricer, notes: tuple[str, ...] = ()) -> Planned:
    """As ``make``, without a word of what would fit."""
    pipeline = work.pipeline
    faults = work.faults()
    if faults:
        raise PlanError(faults)
    share_cores = _shares_cores(cluster)
    if pipeline.stages * pipeline.replicas > cluster.devices and not share_cores:
        faults.append(
            f"K = {pipeline.stages} stages x R = {pipeline.replicas} replicas need "
            f"{pipeline.stages * pipeline.replicas} devices, there are {cluster}"
        )
    if rows := row_faults(work):  # planning so many would take minutes
        raise PlanError([*faults, *rows])
    try:
        price = pricer(work, cluster)
        each = bytes_per_parameter(work.optimizer, pipeline.replicas)
        placement = cluster.place(pipeline.stages, pipeline.replicas) if not faults else None
        machine = _on_one_host(price.machine, work, cluster) if share_cores else price.machine
        if placement is not None:
            machine = _over_nodes(machine, placement, cluster)
            notes += _of_network(placement, cluster)
        if cluster.kind == "gpu":
            reserve = _reserve(machine.limit)
            machine = replace(machine, limit=machine.limit - reserve, reserve=reserve)
        if faults:
            check_memory(price.costs, len(price.costs), pipeline, each, machine)
            raise PlanError(faults)
        plan = make_plan(price.costs, len(price.costs), pipeline, each, machine)
    except BusyError:  # no fault of the plan: devices to measure on are others' now
        raise
    except PlanError as fault:
        raise PlanError(list(dict.fromkeys([*faults, *fault.faults]))) from None
    except (SettingError, PlacementError) as fault:
        raise PlanError([*faults, str(fault)]) from None
    workers = pipeline.stages * pipeline.replicas
    if share_cores and workers > cluster.devices:
        notes += (
            f"{workers} workers share {cluster.devices} cores and take turns: the step takes all they do at least",
        )
    return Planned(work, cluster, price, plan, _parameters(_Keyed.of(work)), notes, placement)


def _over_nodes(machine: Machine, placement: Placement, cluster: Cluster) -> Machine:
    """Returns the machine with the network where workers are on different nodes; where that was not measured, its links
    are taken to be like those inside a node."""
    if cluster.kind == "cpu" and cluster.device is None:  # workers of one node share its memory
        used = Counter(placement.ids)
        share = min(cluster.bytes_per_device * node.total // used[node.id] for node in placement.nodes)
        machine = replace(machine, limit=share)
    network = cluster.between
    if network is None:
        return machine
    assert isinstance(machine.link, Link)
    link = Links(machine.link, network, placement.cuts) if placement.cuts else machine.link
    reduce = machine.reduce_bytes_per_s
    if placement.spread:
        reduce = min(reduce, (cluster.reduction or network).bytes_per_s)
    return replace(machine, link=link, reduce_bytes_per_s=reduce)


def _of_network(placement: Placement, cluster: Cluster) -> tuple[str, ...]:
    """Returns what is to be said of the network that a run at hand goes over."""
    if cluster.device is not None or not (placement.cuts or placement.spread):
        return ()
    if cluster.network is None:
        return ("the network between nodes is not measured (make doctor): taken to be like the links inside a node",)
    latency, rate = cluster.network.latency_s * 1e3, cluster.network.bytes_per_s / 1e6
    return (f"the network between nodes, as the doctor measured it: {latency:.2f} ms, {rate:,.0f} MB/s",)


def _on_one_host(machine: Machine, work: Workload, cluster: Cluster) -> Machine:
    """Returns the machine with what each worker of one host has: memory and cores are shared by all."""
    workers = work.pipeline.stages * work.pipeline.replicas
    return replace(machine, limit=cluster.bytes_per_device * cluster.devices // workers, cores=cluster.devices)


def _process_bytes(work: Workload, cluster: Cluster, pricer: Pricer) -> int:
    """Returns what a worker takes for itself, as the pricer has found it."""
    try:
        return pricer(work, cluster).machine.process
    except SuiteError:
        return 0


def nearest(
    work: Workload, cluster: Cluster, process: int = 0, tell: Tell = lambda text: None
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yields settings that fit where the workload does not, each the smallest change of its kind, and what they give.

    Cells not by hand; rebuilding; more stages; smaller micro-batches; the stages and replicas there are devices for,
    with the same mini-batch or a smaller one. Costs are estimated; of each device a worker takes ``process`` bytes for
    itself.
    """

    def price(changed: Measurable, cluster: Cluster) -> Price:
        found = estimated_price(changed, cluster)
        return replace(found, machine=replace(found.machine, process=max(process, found.machine.process)))

    for changes in _kinds_of_change(work, cluster):
        for changed, settings in changes:
            tell(f"the nearest plans that fit: {settings}")
            try:
                planned = attempt(changed, cluster, price)
            except SuiteError:
                continue
            most = max(stage.peak_bytes for stage in planned.plan.stages)
            # without a declared device the estimate knows bytes alone
            seconds = "" if cluster.device is None else f", {in_seconds(planned.step_s)} a step"
            yield settings, f"{most / GIB:.2f} GiB a device{seconds} (estimated)"
            break


Change = tuple[Workload, str]


def _kinds_of_change(work: Workload, cluster: Cluster) -> Iterator[Iterator[Change]]:
    pipeline = work.pipeline
    layers = len(estimated_price(work, cluster).costs)
    if pipeline.cells is not None:
        yield iter([_changed(work)])
    if pipeline.remat == "never":
        yield iter([_changed(work, remat="except_last")])
    most = min(layers, cluster.devices // pipeline.replicas)
    # by an eighth each time: a plan takes a while, and the fewest stages of all are told with the fault
    counts = sorted({max(pipeline.stages + 1, most * eighth // 8) for eighth in range(1, 9)})
    yield (_changed(work, stages=count) for count in counts if pipeline.stages < count <= most)
    doubled = [pipeline.micro_batches << power for power in range(1, 12)]
    fitting = [count for count in doubled if count * pipeline.replicas <= work.examples]
    yield (_changed(work, micro_batches=count) for count in fitting)
    if cluster.devices > 0:
        stages = min(pipeline.stages, layers, cluster.devices)
        yield _smaller(work, stages, min(pipeline.replicas, cluster.devices // stages))


def _changed(work: Workload, **changes: Any) -> Change:
    """Returns the workload with another pipeline, and the settings that make it; cells by hand go."""
    pipeline = work.pipeline.model_copy(update={**changes, "cells": None})
    settings = [f"pipeline.{name}={value}" for name, value in changes.items()]
    if work.pipeline.cells is not None:
        settings.append("pipeline.cells=none")
    return work.with_pipeline(pipeline), " ".join(settings)


def _smaller(work: Workload, stages: int, replicas: int) -> Iterator[Change]:
    """Yields the stages and replicas there are devices for, with the whole mini-batch, half of it, a quarter, ...

    Micro-batches stay as large as they are, and are no more than there are examples.
    """
    pipeline = work.pipeline
    for power in range(11):
        count = -(-pipeline.micro_batches * pipeline.replicas // (replicas << power))
        count = min(count, (work.examples >> power) // replicas)
        if count < 1:
            return
        changes = {"stages": stages, "replicas": replicas, "micro_batches": count}
        changes = {name: value for name, value in changes.items() if value != getattr(pipeline, name)}
        if not changes and not power:
            continue
        changed, settings = _changed(work, **changes)
        if power:
            try:
                changed, batch = changed.with_share(2.0**-power)
            except SettingError:  # so few that they contradict other settings
                return
            settings = f"{settings} {batch}".strip()
        yield changed, settings
        if count == 1:
            return


def adapted(work: Workload, cluster: Cluster) -> tuple[Workload, tuple[str, ...]]:
    """Returns the workload with as many replicas as the cluster has devices for, and what was changed.

    The mini-batch stays and is cut into as many micro-batches over all: those of fewer replicas are more.
    """
    pipeline = work.pipeline
    room = cluster.devices // pipeline.stages
    if not 0 < room < pipeline.replicas:
        return work, ()
    count = -(-pipeline.micro_batches * pipeline.replicas // room)
    changed = pipeline.model_copy(update={"replicas": room, "micro_batches": count})
    note = (
        f"R {pipeline.replicas} -> {room} and M {pipeline.micro_batches} -> {count}: "
        f"{cluster.devices} devices hold {room} x {pipeline.stages} stages; the mini-batch stays"
    )
    return work.with_pipeline(changed), (note,)


def shrunk_to(chosen: Experiment, devices: int) -> Iterator[Experiment]:
    """Yields a run as it was asked for, then on fewer devices, most first, each with no more than ``devices``.

    The mini-batch stays, and so do its micro-batches: those of fewer replicas are more. So only numbers of replicas
    among which they can be dealt out evenly are offered, and the run's numbers are those of the undisturbed one.
    """
    pipeline = chosen.pipeline
    total = pipeline.micro_batches * pipeline.replicas
    if pipeline.stages * pipeline.replicas <= devices:
        yield chosen
    fewer = [(pipeline.stages, replicas) for replicas in range(pipeline.replicas - 1, 0, -1) if total % replicas == 0]
    for stages, replicas in (*fewer, *((stages, 1) for stages in range(pipeline.stages - 1, 0, -1))):
        if stages * replicas > devices:
            continue
        changes: dict[str, Any] = {"stages": stages, "replicas": replicas, "micro_batches": total // replicas}
        if stages != pipeline.stages:
            changes["cells"] = None
        values = chosen.model_dump()
        values["pipeline"].update(changes)
        with suppress(SettingError):  # the schedule may not go with so few stages
            yield chosen.validated(values)
