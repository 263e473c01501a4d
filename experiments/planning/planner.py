"""Plans a workload on a cluster; a refusal has the nearest plan that fits, or the memory that would."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from experiments.base import overrides
from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.figures import in_seconds
from experiments.base.hints import option
from experiments.base.setting_faults import faults_of
from experiments.base.workload import Measurable
from experiments.planning.memory_limits import reserved_bytes, shares_cores, with_share_of_host
from experiments.planning.model_facts import costs_of_run, model_facts
from experiments.planning.nearest import nearest_plan
from experiments.planning.plan_report import CostModel, LayerCosts, PlanReport
from experiments.planning.single_plan import (
    compared,
    estimated_costs,
    row_errors,
    try_plan,
    with_most_micro_batches,
)
from suite.errors import PlanError, SuiteError
from suite.log import Log
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import least_limit

TENTH = GIB // 10
"""Resolution in bytes of the search for the least memory of a plan."""


def plan_workload(
    work: Experiment, cluster: Cluster, cost_model: CostModel, notes: tuple[str, ...] = (), given: str = "",
    log: Log = lambda text: None,
) -> PlanReport:  # fmt: skip
    """Returns the plan of a workload on a cluster. ``given`` are the user's settings of the workload.

    Raises PlanError with all faults, of devices and of memory, and with all settings of the nearest plan that fits.
    """
    smallest = with_most_micro_batches(work)
    # other numbers of devices would not help
    if faults := smallest.trial_errors() or faults_of(model_facts, smallest):
        raise PlanError(faults, notes=notes)
    try:
        log(f"the plan of {work.name}")
        planned = try_plan(work, cluster, cost_model)
    except PlanError as fault:
        process = 0
        if not row_errors(smallest):
            with suppress(SuiteError):
                process = cost_model(smallest, cluster).machine.process_bytes
        remedy = _remedy(work, cluster, process, given, log)
        all_notes = notes if remedy else (*notes, *_memory_note(smallest, cluster))
        raise PlanError(fault.errors, remedy, all_notes) from None
    return compared(replace(planned, notes=(*notes, *planned.notes)), log)


def _memory_note(work: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yields the memory that would suffice if no setting fits; nothing if memory is not the problem."""
    pipeline = work.pipeline
    has_too_few = cluster.devices < pipeline.stages * pipeline.replicas and not shares_cores(cluster)
    if row_errors(work) or has_too_few:
        return
    with suppress(SuiteError):
        least = least_memory(work, cluster)
        if least is not None and least > cluster.bytes_per_device:
            if shares_cores(cluster):
                needs = f"at least {least * cluster.devices / GIB:.1f} GiB in total"
            else:
                needs = f"devices of at least {least / GIB:.1f} GiB"
            shape = f"K = {pipeline.stages}, M = {pipeline.micro_batches:,}"
            yield f"no setting was found that fits; with {shape} the run needs {needs}"


def least_memory(work: Experiment, cluster: Cluster) -> int | None:
    """Returns the least memory of each device in bytes, reserve included, in tenths of a GiB; None if no memory is
    enough. Costs are estimated."""
    work = with_most_micro_batches(work)
    layer_costs = costs_of_run(estimated_costs(work, cluster), work, cluster)
    each = bytes_per_parameter(work.optimizer, work.pipeline.replicas)
    machine = with_share_of_host(layer_costs.machine, work, cluster)
    # to a MiB: rounded to tenths before the reserve is added, it would be rounded twice
    limit = least_limit(Problem(layer_costs.costs, work.pipeline, each, machine), 2**20)
    if limit is None:
        return None
    tenths = -(-limit // TENTH)
    while tenths * TENTH - reserved_bytes(work, cluster, tenths * TENTH) < limit:
        tenths += 1
    workers = work.pipeline.stages * work.pipeline.replicas
    return -(-tenths * TENTH * workers // cluster.devices) if shares_cores(cluster) else tenths * TENTH


def merged(given: str, settings: str) -> str:
    """Returns the given settings, overridden by others."""
    pairs = dict(setting.partition("=")[::2] for setting in overrides.split(f"{given} {settings}"))
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in pairs.items())


def _remedy(work: Experiment, cluster: Cluster, process: int, given: str, log: Log) -> str:
    """Returns the settings of the nearest plan that fits, with those that are given, and what it needs; empty if none
    fits. Costs are estimated; a worker process itself takes ``process`` bytes."""

    def layer_costs(changed: Measurable, cluster: Cluster) -> LayerCosts:
        costs = estimated_costs(changed, cluster)
        return replace(costs, machine=replace(costs.machine, process_bytes=max(process, costs.machine.process_bytes)))

    nearest = nearest_plan(work, cluster, layer_costs, log)
    if nearest is None:
        return ""
    planned, settings = nearest
    peak = max(stage.peak_bytes for stage in planned.plan.cells)
    # without a declared device only the bytes are estimated
    seconds = "" if cluster.device is None else f", {in_seconds(planned.step_s)} per step"
    chosen = f'"{merged(given, settings)}"'
    return f"{option('SET', chosen)}: {peak / GIB:.2f} GiB per device{seconds} (estimated)"
