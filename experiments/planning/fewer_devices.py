"""A run on fewer devices than it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from suite.errors import SettingError
from suite.settings import AUTO


def limit_replicas_to_cluster(work: Experiment, cluster: Cluster) -> tuple[Experiment, tuple[str, ...]]:
    """Returns the workload with at most as many replicas as the cluster has devices for, and a note on the change.

    Mini-batch and total number of micro-batches stay the same, so each replica gets more micro-batches; with a schedule
    from a file it gets as many, but larger ones.
    """
    pipeline = work.pipeline
    replicas = cluster.most_replicas(pipeline.stages)
    if not 0 < replicas < pipeline.replicas:
        return work, ()
    count = -(-pipeline.micro_batches * pipeline.replicas // replicas)
    if pipeline.schedule_rows:
        count = pipeline.micro_batches
    changed = pipeline.model_copy(update={"replicas": replicas, "micro_batches": count})
    more = "" if count in (AUTO, pipeline.micro_batches) else f" and M {pipeline.micro_batches} -> {count}"
    note = (
        f"R {pipeline.replicas} -> {replicas}{more}: {cluster.devices} devices hold {replicas} x {pipeline.stages} "
        "stages; the mini-batch stays the same"
    )
    return work.with_pipeline(changed), (note,)


def shrunk_to(chosen: Experiment, devices: int) -> Iterator[Experiment]:
    """Yields a run as requested, then on fewer and fewer devices, each if it needs at most ``devices``.

    Mini-batch and micro-batches stay the same, so each replica gets more micro-batches. Only numbers of replicas that
    divide them evenly are used, so the results equal those of the undisturbed run.
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
            changes["layers_per_cell"] = None
        values = chosen.model_dump()
        values["pipeline"].update(changes)
        with suppress(SettingError):  # the schedule may not support so few stages
            yield chosen.validated(values)
