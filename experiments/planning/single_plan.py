"""The plan of a workload in one shape, K x R, on a cluster: costs, memory, and where it may choose, M and the
schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.figures import in_seconds
from experiments.base.workload import Measurable
from experiments.planning.memory_limits import shares_cores, within_memory
from experiments.planning.model_facts import KeyedWork, costs_of_run, model_facts
from experiments.planning.network import across_nodes, network_notes
from experiments.planning.plan_report import LEAST_RUNS, CostModel, LayerCosts, PlanReport, central
from models.chunked_loss import set_logits_bytes
from suite.errors import BusyError, PlacementError, PlanError, SettingError
from suite.log import Log
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GPU_PROCESS_BYTES, Device, Machine
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import check_memory, make_plan, retimed_step_s
from suite.pipeline.planning.schedule_choice import compare_schedules, search_schedule
from suite.settings import AUTO, PipelineSettings

MOST_DOUBLINGS = 6
"""Of K micro-batches where a plan chooses their number and nothing fits: plans nearby take minutes with more, and tiny
micro-batches need more memory for what is kept of each."""

LONGER = 1.02
"""How much longer than the fastest a step takes where the search for M ends. Steps get a little longer before they get
shorter where more micro-batches are small enough to be kept, and not recomputed."""


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
    costs = _estimated(KeyedWork(work, work.key()), device, cluster.logits_bytes)
    reduce = device.link if cluster.device is not None else math.inf
    machine = Machine(
        cluster.bytes_per_device, device.process_bytes, device.messages, reduce, transport=cluster.transport
    )
    share = "" if device.efficiency == 1 else f" at {device.efficiency:.0%} of its peak"
    source = f"operations and bytes over {device.name}{share}"
    return LayerCosts(costs, machine, source, measured=False, device=cluster.device)


@lru_cache(maxsize=64)
def _estimated(keyed: KeyedWork, device: Device, logits_bytes: int) -> tuple[LayerCost, ...]:
    """Cached, because the search for the nearest plan needs the same costs many times."""
    work = keyed.work
    layers, loss = work.build()
    set_logits_bytes(layers, logits_bytes)
    return tuple(estimate(layers, loss, work.sample().largest, device, work.optimizer))


def try_plan(work: Experiment, cluster: Cluster, cost_model: CostModel) -> PlanReport:
    """Returns the plan of a workload, without alternatives. Raises PlanError with all faults, of devices and of memory.

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
    """Returns the plan for given micro-batches."""
    pipeline, share_cores, notes = work.pipeline, shares_cores(cluster), tuple(work.remarks())
    workers = pipeline.stages * pipeline.replicas
    if faults := work.trial_errors():
        raise PlanError(faults)
    if cluster.devices < workers and not share_cores:
        faults.append(
            f"K = {pipeline.stages} stages x R = {pipeline.replicas} replicas need {workers} devices, there are "
            f"{cluster}"
        )
    if rows := row_errors(work):  # planning so many would take minutes
        raise PlanError([*faults, *rows])
    try:
        found_costs = cost_model(work, cluster)
        layer_costs = costs_of_run(found_costs, work, cluster)
        each = bytes_per_parameter(work.optimizer, pipeline.replicas)
        placement = cluster.place(pipeline.stages, pipeline.replicas) if not faults else None
        machine = within_memory(layer_costs.machine, work, cluster, placement)
        if placement is not None:
            machine = across_nodes(machine, placement, cluster)
            notes += network_notes(placement, cluster)
        problem = Problem(layer_costs.costs, pipeline, each, machine)
        if faults:
            check_memory(problem)
            raise PlanError(faults)
        plan = make_plan(problem)
    except BusyError:  # not a fault of the plan: other runs hold the devices
        raise
    except PlanError as fault:
        raise PlanError(list(dict.fromkeys([*faults, *fault.errors]))) from None
    except (SettingError, PlacementError) as fault:
        raise PlanError([*faults, str(fault)]) from None
    if share_cores and workers > cluster.devices:
        notes += (
            f"{workers} workers share {cluster.devices} cores and take turns: a step takes at least their total work",
        )
    placed_costs = replace(layer_costs, machine=machine)
    return PlanReport(work, cluster, found_costs, placed_costs, plan, model_facts(work).parameters, notes, placement)


def numbers_of_micro_batches(work: Experiment) -> Iterator[Experiment]:
    """Yields the workload as it is, if it has a number of micro-batches; otherwise with K, 2K, 4K, ... of them, as long
    as each has an example, and at last with the largest multiple of K; if there are fewer than K examples, with one for
    each."""
    if work.pipeline.micro_batches != AUTO:
        yield work
        return
    pipeline, most = work.pipeline, max(1, work.min_rows // work.pipeline.replicas)
    most = most // pipeline.stages * pipeline.stages or most
    counts = [pipeline.stages << power for power in range((most // pipeline.stages).bit_length())]
    for count in dict.fromkeys([*counts, most]):
        yield work.with_pipeline(pipeline.model_copy(update={"micro_batches": count}))


def with_most_micro_batches(work: Experiment) -> Experiment:
    """Returns the workload with a number of micro-batches: if the plan may choose it, with 64K or as many as there are
    examples for."""
    return list(islice(numbers_of_micro_batches(work), MOST_DOUBLINGS + 1))[-1]


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


def compared(planned: PlanReport, log: Log) -> PlanReport:
    """Returns a plan with its alternatives; where the plan may choose its schedule, with the one that search finds."""
    log("the other schedules")
    layer_costs, pipeline = planned.layer_costs, planned.experiment.pipeline
    each = bytes_per_parameter(planned.experiment.optimizer, pipeline.replicas)
    problem = Problem(layer_costs.costs, pipeline, each, layer_costs.machine)
    plan = search_schedule(compare_schedules(planned.plan, problem), problem)
    return with_step_interval(replace(planned, plan=plan))


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
