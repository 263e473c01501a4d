"""A run on fewer devices than it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.planning.best import largest_shapes
from experiments.planning.plan_report import PlanReport
from experiments.planning.single_plan import try_plan
from suite.errors import PlanError
from suite.settings import AUTO


def limit_replicas_to_cluster(work: Experiment, cluster: Cluster) -> tuple[Experiment, tuple[str, ...]]:
    """Returns the workload with at most as many replicas as the cluster has devices for, and a note on the change.

    Mini-batch and total number of micro-batches stay the same, so each replica gets more micro-batches; with a schedule
    from a file it gets as many, but larger ones.
    """
    pipeline = work.pipeline
    replicas = cluster.devices // pipeline.stages
    if not 0 < replicas < pipeline.replicas:
        return work, ()
    total = pipeline.micro_batches * pipeline.replicas
    count = pipeline.micro_batches if pipeline.schedule_rows else -(-total // replicas)
    changed = pipeline.model_copy(update={"replicas": replicas, "micro_batches": count})
    more = "" if count in (AUTO, pipeline.micro_batches) else f" and M {pipeline.micro_batches} -> {count}"
    note = (
        f"R {pipeline.replicas} -> {replicas}{more}: {cluster.devices} devices hold {replicas} x {pipeline.stages} "
        "stages; the mini-batch stays the same"
    )
    return work.with_pipeline(changed), (note,)


def shrunk_to(planned: PlanReport, devices: int, find_cluster: Callable[[], Cluster]) -> Iterator[Experiment]:
    """Yields a run as planned if it needs at most ``devices``, then at a smaller K or R, fastest by its costs first.

    Micro-batches and schedule stay, and the replicas divide the former evenly: the results are those of the whole run.
    """
    work, asked = planned.experiment, planned.experiment.pipeline
    total = asked.micro_batches * asked.replicas
    if asked.stages * asked.replicas <= devices:
        yield work
    divisors = [count for count in range(1, asked.replicas + 1) if total % count == 0]
    most = {k: max(r for r in divisors if k * r <= devices) for k in range(1, min(devices, asked.stages) + 1)}
    for shapes in filter(None, largest_shapes(most)):
        cluster, plans = find_cluster(), []
        for k, r in shapes:
            cells = asked.layers_per_cell if k == asked.stages else None
            changes = {"stages": k, "replicas": r, "micro_batches": total // r, "layers_per_cell": cells}
            run = work.with_pipeline(asked.model_copy(update=changes))
            with suppress(PlanError):  # the schedule may not support these stages
                plans.append(try_plan(run, cluster, lambda *_: planned.found_costs))
        yield from (plan.experiment for plan in sorted(plans, key=lambda plan: plan.step_s))
