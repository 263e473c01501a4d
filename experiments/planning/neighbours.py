"""Workloads near a given one: other cells, recompute, schedule, stages, micro-batches, replicas, or a smaller
mini-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from suite.errors import SettingError
from suite.settings import AUTO

Change = tuple[Experiment, str]
"""A workload, and the settings that make it."""


def numbers_of_micro_batches(work: Experiment) -> Iterator[Experiment]:
    """Yields the workload with K, 2K, 4K, ... micro-batches, as long as each has an example, and at last with the
    largest multiple of K; if there are fewer than K examples, with one for each."""
    pipeline, most = work.pipeline, max(1, work.min_rows // work.pipeline.replicas)
    most = most // pipeline.stages * pipeline.stages or most
    counts = [pipeline.stages << power for power in range((most // pipeline.stages).bit_length())]
    for count in dict.fromkeys([*counts, most]):
        yield work.with_pipeline(pipeline.model_copy(update={"micro_batches": count}))


def kinds_of_change(work: Experiment, cluster: Cluster, layers: int) -> Iterator[Iterator[Change]]:
    """Yields candidates for each kind of change, smallest change first. ``layers`` counts the model's. A schedule from
    a file keeps its stages and micro-batches."""
    pipeline = work.pipeline
    if pipeline.layers_per_cell is not None:
        yield iter([_changed(work)])
    if pipeline.remat == "never":
        yield iter([_changed(work, remat="except_last")])
    if pipeline.schedule_rows:
        return
    if pipeline.schedule == "fill_drain" and pipeline.stages > 1:  # which holds M inputs, and 1f1b at most K
        yield iter([_changed(work, schedule="1f1b")])
    max_stages = min(layers, cluster.devices // pipeline.replicas)
    # in steps of an eighth, because each plan takes a while and the fault already names the fewest stages
    counts = sorted({max(pipeline.stages + 1, max_stages * eighth // 8) for eighth in range(1, 9)})
    yield (_changed(work, stages=count) for count in counts if pipeline.stages < count <= max_stages)
    doubled = [pipeline.micro_batches << power for power in range(1, 12)]
    fitting = [count for count in doubled if count * pipeline.replicas <= work.min_rows]
    yield (_changed(work, micro_batches=count) for count in fitting)
    if cluster.devices > 0:
        stages = min(pipeline.stages, layers, cluster.devices)
        yield _smaller(work, stages, min(pipeline.replicas, cluster.devices // stages))


def _changed(work: Experiment, **changes: Any) -> Change:
    """Returns the workload with another pipeline and without cells by hand, and the settings for it."""
    pipeline = work.pipeline.model_copy(update={**changes, "layers_per_cell": None})
    settings = [f"pipeline.{name}={value}" for name, value in changes.items()]
    if work.pipeline.layers_per_cell is not None:
        settings.append("pipeline.layers_per_cell=none")
    return work.with_pipeline(pipeline), " ".join(settings)


def _smaller(work: Experiment, stages: int, replicas: int) -> Iterator[Change]:
    """Yields stages and replicas for the available devices, with the whole mini-batch, half of it, a quarter, ...

    Micro-batches keep their size, and there are no more of them than examples.
    """
    pipeline = work.pipeline
    for power in range(11):
        count = -(-pipeline.micro_batches * pipeline.replicas // (replicas << power))
        count = min(count, (work.min_rows >> power) // replicas)
        if count < 1:
            return
        changes = {"stages": stages, "replicas": replicas, "micro_batches": count}
        changes = {name: value for name, value in changes.items() if value != getattr(pipeline, name)}
        if not changes and not power:
            continue
        changed, settings = _changed(work, **changes)
        if power:
            try:
                changed, batch = changed.with_batch_fraction(2.0**-power)
            except SettingError:  # so small that it contradicts other settings
                return
            settings = f"{settings} {batch}".strip()
        yield changed, settings
        if count == 1:
            return


def limit_replicas_to_cluster(work: Experiment, cluster: Cluster) -> tuple[Experiment, tuple[str, ...]]:
    """Returns the workload with at most as many replicas as the cluster has devices for, and a note on the change.

    Mini-batch and total number of micro-batches stay the same, so each replica gets more micro-batches; with a schedule
    from a file it gets as many, but larger ones.
    """
    pipeline = work.pipeline
    replicas = cluster.devices // pipeline.stages
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
