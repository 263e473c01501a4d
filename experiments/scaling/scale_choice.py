"""Chooses a run's scale: the requested one, or the one that fits the available devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.names import Scale
from experiments.planning.choose import limit_replicas_to_cluster, plans_of_shapes, try_plan
from experiments.planning.pipeline_settings import given_names
from experiments.planning.problem import estimated_costs
from experiments.planning.request import least_memory, plan_request
from suite.errors import PlacementError, PlanError, SettingError
from suite.pipeline.planning.devices import GIB


def choose_scale(
    paper: Experiment, requested: Scale, cluster: Cluster, settings: Iterable[str] = (), pipeline_auto: bool = False
) -> tuple[Experiment, str]:
    """Returns the experiment at the requested scale with the user's settings, and one line that says what was shrunk;
    no line of a run for a laptop of which nothing was.

    ``auto`` selects paper if the cluster can hold it and laptop otherwise. Raises PlacementError when ``paper`` is
    requested and does not fit the cluster, SettingError for a bad setting. With ``pipeline_auto`` a run fits if it does
    with any K, R and M.
    """
    settings = list(settings)
    if requested == "slice":
        return _shrunk(paper, paper.at_slice_scale(cluster), settings, "as requested", cluster)
    if paper.scale == "laptop":
        if requested == "paper":
            raise SettingError(f"{paper.name} is not a run of the paper and has no scale paper; omit SCALE")
        chosen = fit_to_cluster(paper.with_settings(settings), cluster)
        return chosen, f"{paper.name}, shrunk: {', '.join(chosen.shrunk)}" if chosen.shrunk else ""
    if requested == "laptop":
        return _shrunk(paper, paper.at_laptop_scale(cluster), settings, "as requested", cluster)
    try:
        whole = paper.with_settings(settings)
    except SettingError as fault:
        if requested == "paper":
            raise
        # raises again if the settings are wrong at any scale
        return _shrunk(paper, paper.at_laptop_scale(cluster), settings, f"because at scale paper {fault}", cluster)
    shortage = _shortage_of_any(whole, cluster, settings) if pipeline_auto else find_shortage(whole, cluster)
    if shortage is None:
        return whole, f"{paper.title}, nothing shrunk"
    if requested == "paper":
        raise PlacementError(
            f"{option('SCALE', 'paper')} of {paper.name} {shortage}; {_remedy(whole, cluster)}, or "
            + option("SCALE", "laptop")
        )
    return _shrunk(paper, paper.at_laptop_scale(cluster), settings, f"because paper {shortage}", cluster)


def _shortage_of_any(experiment: Experiment, cluster: Cluster, settings: list[str]) -> str | None:
    if cluster.kind == "cpu":
        return f"needs GPUs, and there are {cluster}"
    try:
        plans_of_shapes(experiment, cluster, estimated_costs, settings)
    except PlanError as fault:
        return f"does not fit with any K, R and M: {'; '.join(fault.errors)}"
    return None


def find_shortage(experiment: Experiment, cluster: Cluster) -> str | None:
    """Returns what the run needs, by estimated bytes, and what the cluster has; None if the run fits."""
    pipeline = experiment.pipeline
    if cluster.kind == "gpu" and _plan_fault(experiment, cluster) is None:
        return None
    enough = _large_enough(experiment)
    if (fault := _plan_fault(experiment, enough)) is not None:
        return f"cannot run with these settings: {'; '.join(fault.errors)}"
    least = least_memory(experiment, enough)
    assert least is not None, "the run fits devices without a bound"
    return (
        f"needs {enough.devices} GPUs (K = {pipeline.stages} stages x R = {pipeline.replicas} replicas) "
        f"with at least {least / GIB:.1f} GiB each, and there are {cluster}"
    )


def _plan_fault(experiment: Experiment, cluster: Cluster) -> PlanError | None:
    try:
        try_plan(experiment, cluster)
    except PlanError as fault:
        return fault
    return None


def _remedy(experiment: Experiment, cluster: Cluster) -> str:
    try:
        plan_request(experiment, cluster if cluster.kind == "gpu" else _large_enough(experiment), estimated_costs)
    except PlanError as fault:
        if fault.remedy:
            return f"use {fault.remedy.partition(':')[0]}"
    return "use a larger cluster"


def _large_enough(experiment: Experiment) -> Cluster:
    return Cluster(experiment.pipeline.stages * experiment.pipeline.replicas, 2**62, "gpu")


def fit_to_cluster(experiment: Experiment, cluster: Cluster) -> Experiment:
    """Returns a run designed for a laptop with at most as many stages as GPUs; on cores it stays unchanged."""
    max_stages = max(1, cluster.devices)
    if cluster.kind == "cpu" or experiment.pipeline.stages <= max_stages:
        return experiment
    pipeline = experiment.pipeline.model_copy(update={"stages": max_stages, "layers_per_cell": None})
    return experiment.with_pipeline(pipeline).with_changes_from(experiment)


HEADLINES = (
    *("model.blocks_per_stack", "model.layers", "model.width", "model.feed_forward", "model.heads", "model.filters"),
    *("text.", "images.source", "images.size", "pipeline.", "train.batch", "train.steps"),
)
"""Prefixes of the settings whose change the one line names; ``shrunk`` lists all changes."""


def _shrunk(
    paper: Experiment, shrunk: Experiment, settings: list[str], why: str, cluster: Cluster
) -> tuple[Experiment, str]:
    small = shrunk.with_settings(settings)
    if "replicas" not in given_names(paper, settings):  # those of the scale are for its own K
        enough = replace(cluster, devices=max(cluster.devices, small.pipeline.stages))
        small = limit_replicas_to_cluster(small, enough)[0].with_settings(settings)
    small = small.with_changes_from(paper)
    headlines = [line for line in small.shrunk if line.startswith(HEADLINES)]
    rest = len(small.shrunk) - len(headlines)
    return small, f"{small.title}, {why}: {', '.join(headlines)}, and {rest} more in experiment.toml"
