"""Plans a workload on a cluster; if the plan does not fit, finds the closest plans that do."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from experiments.base import overrides
from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.base.workload import Measurable
from experiments.planning.model_facts import KeyedWork, model_facts, with_communicators, with_optimizer_state
from experiments.planning.neighbours import kinds_of_change, numbers_of_micro_batches
from experiments.planning.network import across_nodes, network_notes
from experiments.planning.plan_report import LEAST_RUNS, CostModel, LayerCosts, PlanReport, central, in_seconds
from models.chunked_loss import set_logits_bytes
from suite.errors import BusyError, PlacementError, PlanError, SettingError, SuiteError
from suite.log import Log
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GIB, GPU_PROCESS_BYTES, Device, Machine
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import check_memory, least_limit, make_plan, retimed_step_s
from suite.pipeline.planning.schedule_choice import compare_schedules, search_schedule
from suite.settings import AUTO, PipelineSettings

MOST_DOUBLINGS = 6
"""Of K micro-batches where a plan chooses their number and nothing fits: plans nearby take minutes with more, and tiny
micro-batches need more memory for what is kept of each."""

LONGER = 1.02
"""How much longer than the fastest a step takes where the search for M ends. Steps get a little longer before they get
shorter where more micro-batches are small enough to be kept, and not recomputed."""

TENTH = GIB // 10
"""Resolution in bytes of the search for the least memory of a plan."""


def estimated_costs(work: Measurable, cluster: Cluster) -> LayerCosts:
    """Estimates costs from operations and bytes on the cluster's declared device.

    For this machine, which has no declared device, uses its memory and the speed of a TPUv3 core; the callers then only
    use the bytes.
    """
    device = cluster.device
    if device is None:
        is_gpu, memory = cluster.kind == "gpu", cluster.bytes_per_device
        process = GPU_PROCESS_BYTES if is_gpu else 0
        device = replace(DEVICES["TPUv3"], memory_bytes=memory, is_cuda=is_gpu, process_bytes=process)
    costs = _estimated(KeyedWork(work, work.key()), device, cluster.logits_bytes)
    reduce = device.link if cluster.device is not None else math.inf
    machine = Machine(
        cluster.bytes_per_device, device.process_bytes, device.messages, reduce, transport=cluster.transport
    )
    return LayerCosts(costs, machine, _source(device), measured=False, device=cluster.device)


@lru_cache(maxsize=64)
def _estimated(keyed: KeyedWork, device: Device, logits_bytes: int) -> tuple[LayerCost, ...]:
    """Cached, because the search for the closest plans needs the same costs many times."""
    work = keyed.work
    layers, loss = work.build()
    set_logits_bytes(layers, logits_bytes)
    return tuple(estimate(layers, loss, work.sample().largest, device, work.optimizer))


def _source(device: Device) -> str:
    share = "" if device.efficiency == 1 else f" at {device.efficiency:.0%} of its peak"
    return f"operations and bytes over {device.name}{share}"


def _of_run(layer_costs: LayerCosts, work: Experiment, cluster: Cluster) -> LayerCosts:
    """Returns the costs with the state of the run's optimizer, and with its communicators."""
    machine = with_communicators(layer_costs.machine, work, cluster)
    return replace(layer_costs, costs=with_optimizer_state(layer_costs.costs, work), machine=machine)


def plan_workload(
    work: Experiment, cluster: Cluster, cost_model: CostModel, notes: tuple[str, ...] = (), given: str = "",
    log: Log = lambda text: None,
) -> PlanReport:  # fmt: skip
    """Returns the plan of a workload on a cluster. ``given`` are the user's settings of the workload.

    Raises PlanError with all faults, of devices and of memory, and with the closest plans that fit, each with all its
    settings.
    """
    smallest = _with_most_micro_batches(work)
    if faults := smallest.trial_errors() or _frozen_errors(smallest):  # other numbers of devices would not help
        raise PlanError(faults, notes=notes)
    try:
        log(f"the plan of {work.name}")
        planned = try_plan(work, cluster, cost_model)
    except PlanError as fault:
        process = 0 if row_errors(smallest) else _process_bytes(smallest, cluster, cost_model)
        suggestions = suggest_changes(smallest, cluster, process, log)
        changes = ((f'"{merged(given, settings)}"', gain) for settings, gain in suggestions)
        remedies = [f"{option('SET', settings)}: {gain}" for settings, gain in changes]
        all_notes = notes if remedies else (*notes, *_memory_note(smallest, cluster))
        raise PlanError(fault.errors, remedies, all_notes) from None
    return compared(replace(planned, notes=(*notes, *planned.notes)), log)


def compared(planned: PlanReport, log: Log) -> PlanReport:
    """Returns a plan with its alternatives; where the plan may choose its schedule, with the one that search finds."""
    log("the other schedules")
    layer_costs, pipeline = planned.layer_costs, planned.experiment.pipeline
    each = bytes_per_parameter(planned.experiment.optimizer, pipeline.replicas)
    asked = layer_costs.costs, pipeline, each, layer_costs.machine
    plan = search_schedule(compare_schedules(planned.plan, *asked), *asked)
    return with_step_interval(replace(planned, plan=plan))


def _frozen_errors(work: Experiment) -> list[str]:
    """Returns faults of the model's frozen parameters, before workers start."""
    try:
        model_facts(work)
    except SettingError as fault:
        return [str(fault)]
    return []


def _with_most_micro_batches(work: Experiment) -> Experiment:
    """Returns the workload with a number of micro-batches: if the plan may choose it, with 64K or as many as there are
    examples for."""
    if work.pipeline.micro_batches != AUTO:
        return work
    return list(islice(numbers_of_micro_batches(work), MOST_DOUBLINGS + 1))[-1]


def _memory_note(work: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yields the memory that would suffice if no setting fits; nothing if memory is not the problem."""
    pipeline = work.pipeline
    if row_errors(work) or (pipeline.stages * pipeline.replicas > cluster.devices and not _shares_cores(cluster)):
        return
    with suppress(SuiteError):
        least = least_memory(work, cluster)
        if least is not None and least > cluster.bytes_per_device:
            if _shares_cores(cluster):
                needs = f"at least {least * cluster.devices / GIB:.1f} GiB in total"
            else:
                needs = f"devices of at least {least / GIB:.1f} GiB"
            shape = f"K = {pipeline.stages}, M = {pipeline.micro_batches:,}"
            yield f"no setting was found that fits; with {shape} the run needs {needs}"


def least_memory(work: Experiment, cluster: Cluster) -> int | None:
    """Returns the least memory of each device in bytes, reserve included, in tenths of a GiB; None if no memory is
    enough. Costs are estimated."""
    work = _with_most_micro_batches(work)
    layer_costs = _of_run(estimated_costs(work, cluster), work, cluster)
    each = bytes_per_parameter(work.optimizer, work.pipeline.replicas)
    if not _shares_cores(cluster):
        # to a MiB: rounded to tenths before the reserve is added, it would be rounded twice
        limit = least_limit(layer_costs.costs, work.pipeline, each, layer_costs.machine, 2**20)
        if limit is None:
            return None
        tenths = -(-limit // TENTH)
        while cluster.kind == "gpu" and tenths * TENTH - _reserve(work, tenths * TENTH) < limit:
            tenths += 1
        return tenths * TENTH
    limit = least_limit(layer_costs.costs, work.pipeline, each, _on_one_host(layer_costs.machine, work, cluster), TENTH)
    workers = work.pipeline.stages * work.pipeline.replicas
    return None if limit is None else -(-limit * workers // cluster.devices)


def _reserve(work: Experiment, memory: int) -> int:
    """Returns the bytes of a device that a plan leaves free."""
    return int(work.pipeline.memory_reserve * memory)


def _shares_cores(cluster: Cluster) -> bool:
    """Whether workers may share the cores of this machine. A declared cluster has no more devices than declared."""
    return cluster.kind == "cpu" and cluster.device is None and not cluster.nodes


def row_errors(work: Experiment) -> list[str]:
    """Returns a fault if there are more micro-batches than rows in a mini-batch."""
    pipeline, rows = work.pipeline, work.max_rows
    if pipeline.replicas * pipeline.micro_batches <= rows:
        return []
    return [
        f"R = {pipeline.replicas} x M = {pipeline.micro_batches:,} micro-batches are more than the {rows:,} examples "
        f"that a step of {work.batch:,} {work.unit} has at most; use {_fewer_parts(pipeline, rows)}"
    ]


def _fewer_parts(pipeline: PipelineSettings, rows: int) -> str:
    """Returns the setting for at most one micro-batch per row: M, or R if M = 1 is still too many."""

    def at_most(name: str, count: int) -> str:
        return f"pipeline.{name}={count}" + (" or fewer" if count > 1 else "")

    if pipeline.replicas <= rows:
        return at_most("micro_batches", rows // pipeline.replicas)
    if pipeline.micro_batches <= rows:
        return at_most("replicas", rows // pipeline.micro_batches)
    return f"pipeline.replicas=1 with {at_most('micro_batches', rows)}"


def merged(given: str, settings: str) -> str:
    """Returns the given settings, overridden by others."""
    pairs = dict(setting.partition("=")[::2] for setting in overrides.split(f"{given} {settings}"))
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in pairs.items())


def try_plan(work: Experiment, cluster: Cluster, cost_model: CostModel) -> PlanReport:
    """Like ``plan_workload``, without suggestions.

    Where the plan may choose M, it tries K, 2K, 4K, ... until a step takes over ``LONGER`` times the fastest, or two in
    a row are no faster: more of them leave a smaller bubble, but each has fixed costs. The fastest plan stays. When
    none fits, the faults are those of 64K micro-batches or of as many as there are examples for.
    """
    if work.pipeline.micro_batches != AUTO:
        return _try_plan(work, cluster, cost_model)
    plans: list[PlanReport] = []
    fault: PlanError | None = None
    for doublings, choice in enumerate(numbers_of_micro_batches(work)):
        try:
            plans.append(_try_plan(choice, cluster, cost_model))
        except PlanError as error:
            if plans:
                break
            if doublings <= MOST_DOUBLINGS:
                fault = error
            continue
        best = min(range(len(plans)), key=lambda at: plans[at].step_s)
        if plans[-1].step_s > LONGER * plans[best].step_s or len(plans) - 1 - best == 2:
            break
    if not plans:
        assert fault is not None, "at least one number was tried"
        raise fault
    chosen = min(plans, key=lambda plan: plan.step_s)
    steps = ", ".join(f"{in_seconds(plan.step_s)} with M = {plan.experiment.pipeline.micro_batches}" for plan in plans)
    more = f"; fewer than {plans[0].experiment.pipeline.micro_batches} do not fit" if fault is not None else ""
    note = f"the plan chose M = {chosen.experiment.pipeline.micro_batches}: a step takes {steps}{more}"
    return replace(chosen, notes=(*chosen.notes, note))


def _try_plan(work: Experiment, cluster: Cluster, cost_model: CostModel) -> PlanReport:
    pipeline = work.pipeline
    notes: tuple[str, ...] = ()
    faults = work.trial_errors()
    if faults:
        raise PlanError(faults)
    share_cores = _shares_cores(cluster)
    if pipeline.stages * pipeline.replicas > cluster.devices and not share_cores:
        faults.append(
            f"K = {pipeline.stages} stages x R = {pipeline.replicas} replicas need "
            f"{pipeline.stages * pipeline.replicas} devices, there are {cluster}"
        )
    if rows := row_errors(work):  # planning so many would take minutes
        raise PlanError([*faults, *rows])
    try:
        layer_costs = _of_run(cost_model(work, cluster), work, cluster)
        each = bytes_per_parameter(work.optimizer, pipeline.replicas)
        placement = cluster.place(pipeline.stages, pipeline.replicas) if not faults else None
        machine = _on_one_host(layer_costs.machine, work, cluster) if share_cores else layer_costs.machine
        if placement is not None:
            machine = across_nodes(machine, placement, cluster)
            notes += network_notes(placement, cluster)
        if cluster.kind == "gpu":
            reserve = _reserve(work, machine.memory_limit_bytes)
            machine = replace(machine, memory_limit_bytes=machine.memory_limit_bytes - reserve, reserve=reserve)
        if faults:
            check_memory(layer_costs.costs, pipeline, each, machine)
            raise PlanError(faults)
        plan = make_plan(layer_costs.costs, pipeline, each, machine)
    except BusyError:  # not a fault of the plan: other runs hold the devices
        raise
    except PlanError as fault:
        raise PlanError(list(dict.fromkeys([*faults, *fault.errors]))) from None
    except (SettingError, PlacementError) as fault:
        raise PlanError([*faults, str(fault)]) from None
    workers = pipeline.stages * pipeline.replicas
    if share_cores and workers > cluster.devices:
        notes += (
            f"{workers} workers share {cluster.devices} cores and take turns: a step takes at least their total work",
        )
    placed_costs = replace(layer_costs, machine=machine)
    return PlanReport(work, cluster, placed_costs, plan, model_facts(work).parameters, notes, placement)


def with_step_interval(report: PlanReport) -> PlanReport:
    """Returns the plan with ``step_interval_s``."""
    device, machine, logits_bytes = report.layer_costs.device, report.layer_costs.machine, report.cluster.logits_bytes
    if device is None:
        if len(report.layer_costs.step_ratios) < LEAST_RUNS:
            return report
        low, high = central(report.layer_costs.step_ratios)
        return replace(report, step_interval_s=(low * report.step_s, high * report.step_s))
    keyed = KeyedWork(report.experiment, report.experiment.key())
    low, high = (
        retimed_step_s(report.plan, _estimated(keyed, replace(device, efficiency=share), logits_bytes), machine)
        for share in reversed(device.efficiency_range)
    )
    return replace(report, step_interval_s=(low, high))


def _on_one_host(machine: Machine, work: Experiment, cluster: Cluster) -> Machine:
    """Returns the machine with each worker's share of one host's memory and cores."""
    workers = work.pipeline.stages * work.pipeline.replicas
    return replace(
        machine, memory_limit_bytes=cluster.bytes_per_device * cluster.devices // workers, cores=cluster.devices
    )


def _process_bytes(work: Experiment, cluster: Cluster, cost_model: CostModel) -> int:
    """Returns the bytes of a worker process itself, from the cost model."""
    try:
        return cost_model(work, cluster).machine.process_bytes
    except SuiteError:
        return 0


def suggest_changes(
    work: Experiment, cluster: Cluster, process: int = 0, log: Log = lambda text: None
) -> Iterator[tuple[str, str]]:
    """Yields settings that fit, each the smallest change of its kind, and a description of the result.

    Kinds: planned cells instead of cells by hand; recompute; more stages; smaller micro-batches; stages and replicas
    for the available devices, with the same mini-batch or a smaller one. Costs are estimated; a worker process itself
    takes ``process`` bytes.
    """

    def layer_costs(changed: Measurable, cluster: Cluster) -> LayerCosts:
        costs = estimated_costs(changed, cluster)
        return replace(costs, machine=replace(costs.machine, process_bytes=max(process, costs.machine.process_bytes)))

    for changes in kinds_of_change(work, cluster, len(estimated_costs(work, cluster).costs)):
        for changed, settings in changes:
            log(f"the nearest plans that fit: {settings}")
            try:
                planned = try_plan(changed, cluster, layer_costs)
            except SuiteError:
                continue
            peak = max(stage.peak_bytes for stage in planned.plan.cells)
            # without a declared device only the bytes are estimated
            seconds = "" if cluster.device is None else f", {in_seconds(planned.step_s)} per step"
            yield settings, f"{peak / GIB:.2f} GiB per device{seconds} (estimated)"
            break
